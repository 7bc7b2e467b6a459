from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.artifacts.facts import facts_from_config
from megarl.config.load import load_config
from megarl.config.model import ModelConfig
from megarl.data.batch import Batch, Jagged
from megarl.models.hf import facts_of, load_hf_config
from megarl.planning.flops import FlopCounter
from tests.models.tiny import tiny_dict

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


def test_the_draft_head_has_its_layer_a_projection_and_the_vocabulary_head_with_constant_weights():
    """Counted by hand: GLM's 4 queries and 2 keys of 24, 3 of 8 experts of 32, 2 shared ones, width 64."""
    facts = facts_from_config(tiny_dict("glm4_moe"), "tiny")
    counted = FlopCounter.of(replace(facts, trains_draft=True))
    attention, router, experts, shared = 2 * 64 * (4 + 2) * 24, 64 * 8, 3 * 3 * 64 * 32, 3 * 64 * 2 * 32
    projection, head, pair = 2 * 64 * 64, 64 * 131, 4 * 4 * 24
    tokens, responses = 2 * (attention + router + experts + shared + projection) * (5 + 7), 2 * head * (3 + 4)
    pairs = pair * (5 * 6 + 7 * 8) / 2
    assert counted.train_draft([5, 7], 3 + 4) == 3 * (tokens + pairs) + 2 * responses
    plain = FlopCounter.of(facts)
    assert replace(counted, draft=None) == plain
    assert plain.train_draft([5, 7], 3 + 4) == 0


def test_a_run_counts_the_draft_head_in_updates_of_the_policy_only():
    from megarl.runtime.context import StepContext

    hf = load_hf_config(ModelConfig(hf_config=tiny_dict("glm4_moe")))
    config = load_config("grpo_quickstart", ["actor.mtp={}"])
    step = StepContext(config, None, hf, None, None)
    prompts, responses = Jagged.from_list([[3, 4, 5, 6]]), Jagged.from_list([[7, 8, 9]])
    samples = Batch({"prompt_ids": prompts, "response_ids": responses}, {})
    step.count_pass(samples)
    step.count_pass(samples, train=True, head=False)  # of a critic
    step.count_pass(samples, train=True)
    counted, plain = step.flops, FlopCounter.of(facts_of(hf))
    [length] = [length for lengths in step.sequences.sample_columns(samples) for length in lengths]
    expected = plain.forward([length], 3) + plain.train([length], 0) + plain.train([length], 3)
    assert step.metrics.result()["perf/flops"] == expected + counted.train_draft([length], 3)


def counter(window=None):
    return FlopCounter(100.0, per_pair={window: 7.0}, per_head_token=11.0, per_decoded_pair={window: 8.0})


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_generation_equals_adding_up_token_by_token(window):
    prompts, responses = [5, 1, 9], [[3, 1], [4], [1, 8, 2]]
    seen = (lambda c: c) if window is None else (lambda c: min(c, window))
    total = 0.0
    for prompt, samples in zip(prompts, responses, strict=True):
        total += 100.0 * prompt + 7.0 * sum(seen(c) for c in range(1, prompt + 1)) + 11.0
        for sample in samples:
            total += sum(111.0 + 8.0 * seen(prompt + i) for i in range(1, sample))
    assert counter(window).generate(prompts, responses) == pytest.approx(total)


def test_layers_with_and_without_a_window_are_added_up():
    both = FlopCounter(per_token=0.0, per_pair={None: 2.0, 3: 5.0}, per_head_token=0.0, per_decoded_pair={})
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


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_the_work_of_a_vision_encoder_is_that_of_its_products(kind):
    """Against what torch counts in transformers' module, over two images; windows that attend to less are the sum of
    their squares, which no window of these images is larger than."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from megarl.config.model import ModelConfig
    from megarl.models.hf import encoder_of, load_hf_config
    from megarl.models.vlm.model import build_encoder
    from megarl.planning.vision import image_flops
    from tests.models.vlm_tiny import config_of

    hf = load_hf_config(ModelConfig(hf_config=config_of(kind)))
    module, encoder = build_encoder(hf, torch.float32), encoder_of(hf)
    grids = torch.tensor([[1, 4, 4], [1, 8, 4]])
    pixels = torch.zeros(int(grids.prod(1).sum()), encoder.patch_values)
    with FlopCounterMode(display=False) as counted, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        module(pixels, grid_thw=grids)
    found = image_flops(encoder, grids.prod(1).tolist())
    assert found == pytest.approx(counted.get_total_flops(), rel=1e-6)


def test_the_work_of_a_robots_towers_is_that_of_their_products():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from megarl.architectures.vision import VisionShape
    from megarl.planning.vision import picture_flops
    from megarl.robots.models.vla.vision import Vision
    from tests.robots.models.vla.small import CONFIG

    shape = VisionShape.from_config(CONFIG, 32, "small")
    with FlopCounterMode(display=False) as counted, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        Vision(shape, torch.float32, sequence_parallel=False).see(torch.zeros(3, 6, 8, 8))
    assert 3 * picture_flops(shape) == pytest.approx(counted.get_total_flops(), rel=1e-6)
