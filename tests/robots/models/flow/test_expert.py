"""The action expert against transformers' whole pi0, and the gradients of chains by finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.architectures.action_expert import ExpertShape
from megarl.robots.models.flow.expert import ActionExpert, PrefixKeys
from megarl.robots.models.flow.process import Denoising
from megarl.system.errors import ConfigError

DIM, CHUNK, STATE, GROUPS, HEAD = 6, 5, 4, 1, 16
TEXT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "hidden_size": 32,
    "tie_word_embeddings": True,
}
CONFIG: dict[str, Any] = {
    "text_config": TEXT,
    "action_expert": {"hidden_size": 24, "intermediate_size": 48, "action_dim": DIM, "state_dim": STATE},
}


def expert_of(dtype: torch.dtype) -> ActionExpert:
    shape = ExpertShape.from_config(CONFIG, "config.json")
    assert shape is not None
    torch.manual_seed(5)
    return ActionExpert(shape, dtype)


def pi0() -> Any:
    """transformers' model with every part in small: SigLIP, Gemma, and the expert, at random."""
    from transformers import PI0Config, PI0ForConditionalGeneration

    shared = {k: TEXT[k] for k in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")}
    eyes = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    eyes |= {"num_attention_heads": 2, "patch_size": 4, "image_size": 8, "vision_use_head": False}
    text = {"model_type": "gemma", "hidden_size": 32, "intermediate_size": 40, "vocab_size": 61, **shared}
    vlm = {"model_type": "paligemma", "text_config": text, "vision_config": eyes}
    vlm |= {"projection_dim": 32, "image_token_id": 60}
    torch.manual_seed(5)
    config = PI0Config(
        vlm_config=vlm,
        dit_config={"model_type": "gemma", "hidden_size": 24, "intermediate_size": 48, **shared},
        chunk_size=CHUNK,
        max_state_dim=STATE,
        max_action_dim=DIM,
    )
    return PI0ForConditionalGeneration(config).eval()


def test_velocities_are_those_of_transformers_pi0() -> None:
    """Of pictures and prompts of two lengths, at three flow times that the expert reads in one pass."""
    model, expert = pi0(), expert_of(torch.float32)
    mine, theirs = dict(expert.named_parameters()), dict(model.named_parameters())
    shape = ExpertShape.from_config(CONFIG, "config.json")
    assert shape is not None
    assert {name: tuple(p.shape) for name, p in mine.items()} == {
        name: size for name, (_, size) in shape.tensors.items()
    }
    with torch.no_grad():
        for name, (published, _) in shape.tensors.items():
            mine[name].copy_(theirs[published])
    rng = torch.Generator().manual_seed(2)
    normal = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    ids = torch.tensor([[60] * 4 + [2, 7, 9], [60] * 4 + [2, 11, 0]])
    seen = torch.tensor([[1] * 7, [1] * 6 + [0]])
    pixels, states, noisy, times = normal(2, 1, 3, 8, 8), normal(2, STATE), normal(2, 3, CHUNK, DIM), torch.rand(2, 3)
    cameras = torch.ones(2, 1, dtype=torch.bool)
    given = {"attention_mask": seen, "pixel_attention_mask": cameras}
    with torch.no_grad():
        embedded = model.model.embed_prefix(ids, pixels, cameras)
        cache = model.model.vlm(
            inputs_embeds=embedded,
            attention_mask=seen,
            position_ids=seen.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(ids),
            use_cache=True,
        ).past_key_values
        layers = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        found = expert(PrefixKeys(layers, seen.sum(1)), states, noisy, times)
        for block in range(3):
            wanted = model(
                state=states,
                noise=noisy[:, block],
                timestep=times[:, block],
                input_ids=ids,
                pixel_values=pixels,
                **given,
            ).logits
            # float32 sums in another order, of velocities of about 1
            torch.testing.assert_close(found[:, block], wanted, atol=1e-5, rtol=0)
    assert float(found.std()) > 0.01, "velocities that differ"


def test_gradients_of_a_chains_log_prob_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # Gemma's norms are float32 whatever the dtype
    expert, process = expert_of(torch.float64), Denoising(2, 0.5)
    rng = torch.Generator().manual_seed(4)
    normal = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    keys = [tuple(normal(1, GROUPS, 3, HEAD).requires_grad_() for _ in range(2)) for _ in range(2)]
    states, chain = normal(1, STATE), normal(1, 3, CHUNK, DIM)
    times = torch.tensor([process.times], dtype=torch.float64)

    def joint() -> Tensor:
        prefix = PrefixKeys([(k, v) for k, v in keys], torch.tensor([3]))
        return process.log_probs(chain, expert(prefix, states, chain[:, :-1], times)).sum()

    inputs = [*expert.parameters(), *(part for layer in keys for part in layer)]
    gradients = torch.autograd.grad(joint(), inputs)
    directions = [normal(*one.shape) for one in inputs]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    values, width = [], 1e-6
    for sign in (1, -2):
        with torch.no_grad():
            for one, direction in zip(inputs, directions, strict=True):
                one += sign * width * direction
            values.append(float(joint()))
    assert (values[0] - values[1]) / (2 * width) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"action_expert": {"hidden_size": 24}}, "action_expert"),
        ({"action_expert": CONFIG["action_expert"] | {"depth": 3}}, "action_expert"),
        ({"action_expert": CONFIG["action_expert"] | {"hidden_size": 23}}, "action_expert.hidden_size"),
        ({"action_expert": CONFIG["action_expert"] | {"state_dim": 0}}, "action_expert.state_dim"),
        ({"action_expert": CONFIG["action_expert"] | {"min_period": 9.0}}, "action_expert.min_period"),
        ({"text_config": TEXT | {"model_type": "gemma2"}}, "text_config.model_type"),
        ({"text_config": TEXT | {"tie_word_embeddings": False}}, "text_config.tie_word_embeddings"),
        ({"text_config": TEXT | {"num_hidden_layers": None}}, "text_config.num_hidden_layers"),
        ({"text_config": TEXT | {"rope_parameters": {"rope_type": "yarn"}}}, "text_config.rope_parameters"),
    ],
)
def test_an_expert_that_cannot_be_built_is_refused_with_its_place(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ExpertShape.from_config(CONFIG | changes, "small")
    assert f"small.{key}" in str(caught.value)
