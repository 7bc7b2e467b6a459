import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.models.hf import facts_of
from megarl.planning.flops import FlopCounter

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def hf_config(kind):
    import transformers

    if kind == "llama":
        return transformers.LlamaConfig(**SMALL)
    if kind == "qwen3":
        return transformers.Qwen3Config(**SMALL, head_dim=32)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]
        )
    return transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "mixtral"])
def test_forward_and_backward_equal_torch_s_own_count(kind):
    from transformers import AutoModelForCausalLM

    config = hf_config(kind)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    length = 24
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.randint(0, 128, (1, length)))
    ours = FlopCounter.of(facts_of(config))
    # Eager attention computes the whole square, the model itself only needs the causal half.
    rest_of_square = (length**2 - length * (length + 1) / 2) * ours.per_pair[None]
    assert counted.get_total_flops() == ours.forward([length]) + rest_of_square
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.randint(0, 128, (1, length))).logits.sum().backward()
    assert counted.get_total_flops() == ours.train([length]) + 3 * rest_of_square


def counter(window=None):
    return FlopCounter(per_token=100.0, per_pair={window: 7.0}, per_head_token=11.0)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_generation_equals_adding_up_token_by_token(window):
    prompts, responses = [5, 1, 9], [[3, 1], [4], [1, 8, 2]]
    seen = (lambda c: c) if window is None else (lambda c: min(c, window))
    total = 0.0
    for prompt, samples in zip(prompts, responses, strict=True):
        total += 100.0 * prompt + 7.0 * sum(seen(c) for c in range(1, prompt + 1)) + 11.0
        for sample in samples:
            total += sum(111.0 + 7.0 * seen(prompt + i) for i in range(1, sample))
    assert counter(window).generate(prompts, responses) == pytest.approx(total)


def test_layers_with_and_without_a_window_are_added_up():
    both = FlopCounter(per_token=0.0, per_pair={None: 2.0, 3: 5.0}, per_head_token=0.0)
    assert both.forward([6]) == 2 * (1 + 2 + 3 + 4 + 5 + 6) + 5 * (1 + 2 + 3 + 3 + 3 + 3)


def test_uneven_lengths_have_more_pairs_than_their_mean():
    """Lengths of 4 and 8: 10 + 36 pairs, where two of 6 have 42; with a window of 3 they have 9 + 21, as two of 6."""
    assert counter().unevenness(6, 4.0) == (46 - 42) / 2 * 7.0
    assert counter(window=3).unevenness(6, 4.0) == 0


def test_training_is_three_forwards_and_the_head_may_see_fewer_tokens():
    assert counter().train([4, 2], head_tokens=3) == 3 * (6 * 100.0 + (10 + 3) * 7.0 + 33.0)


def test_a_window_that_the_class_does_not_read_saves_nothing():
    import transformers

    config = transformers.LlamaConfig(**SMALL, sliding_window=4, num_experts=2)
    assert FlopCounter.of(facts_of(config)) == FlopCounter.of(facts_of(hf_config("llama")))
    assert set(FlopCounter.of(facts_of(transformers.MixtralConfig(**SMALL, sliding_window=4))).per_pair) == {4}
