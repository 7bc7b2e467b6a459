"""The gated delta rule by chunks against the rule token by token, and the convolution against torch's."""

import sys

import pytest
import torch
import torch.nn.functional as F

from megarl.models.layers.gated_delta import rule
from megarl.models.layers.gated_delta.rule import ChunkPlan, DeltaInputs, causal_conv, chunked, delta_step, recurrent

KEY_HEADS, PER, KEYS, VALUES = 2, 3, 4, 5


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> DeltaInputs:
    rng = torch.Generator().manual_seed(tokens)
    q, k = torch.randn(2, tokens, KEY_HEADS, KEYS, generator=rng, dtype=torch.float64)
    v = torch.randn(tokens, KEY_HEADS, PER, VALUES, generator=rng, dtype=torch.float64)
    g, beta = torch.rand(2, tokens, KEY_HEADS, PER, generator=rng, dtype=torch.float64)
    return DeltaInputs(*(x.to(dtype).requires_grad_() for x in (q, k, v, -3 * g, beta)))


def states(sequences: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(sequences, KEY_HEADS, PER, KEYS, VALUES, generator=rng, dtype=torch.float64)


def part(x: DeltaInputs, tokens: slice) -> DeltaInputs:
    return DeltaInputs(x.q[tokens], x.k[tokens], x.v[tokens], x.g[tokens], x.beta[tokens])


@pytest.mark.parametrize("lengths", [[1], [64], [3, 3, 3], [65, 1, 130, 64, 17]])
def test_chunks_give_the_outputs_states_and_gradients_of_single_tokens(lengths):
    x, before = inputs(sum(lengths)), states(len(lengths))
    leaves = [x.q, x.k, x.v, x.g, x.beta]
    results = recurrent(x, lengths, before), chunked(x, ChunkPlan.of(lengths, before.device), before, want_state=True)
    grads = []
    for out, after in results:
        weighted = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() + after.square().sum()
        grads.append(torch.autograd.grad(weighted, leaves))
    for found, expected in zip([*results[1], *grads[1]], [*results[0], *grads[0]], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


def test_gradients_can_be_computed_after_generation():
    """Generation runs in inference mode, and may be the first to need a mask that is kept."""
    x, plan = inputs(4), ChunkPlan.of([4], torch.device("cpu"))
    rule._above.cache_clear()
    with torch.inference_mode():
        chunked(x, plan)
    out, _ = chunked(x, plan)
    out.sum().backward()
    assert x.g.grad is not None


def test_a_sequence_does_not_depend_on_its_neighbours_in_the_stream():
    lengths = [5, 70, 2]
    x = inputs(sum(lengths), torch.float32)
    together, after = chunked(x, ChunkPlan.of(lengths, x.q.device), want_state=True)
    for number, tokens in enumerate((slice(0, 5), slice(5, 75), slice(75, 77))):
        alone, state = recurrent(part(x, tokens), [tokens.stop - tokens.start])
        torch.testing.assert_close(together[tokens], alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(after[number], state[0], atol=1e-5, rtol=1e-5)


def test_a_prefix_and_its_continuation_give_the_whole_sequence():
    x = inputs(90)
    whole, last = recurrent(x, [90])
    first, between = chunked(part(x, slice(0, 67)), ChunkPlan.of([67], x.q.device), want_state=True)
    second, after = chunked(part(x, slice(67, 90)), ChunkPlan.of([23], x.q.device), between, want_state=True)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(after, last, atol=1e-12, rtol=0)


@torch.no_grad()
def test_steps_update_the_states_in_place():
    x, state = inputs(3), states(3)
    out, after = recurrent(x, [1, 1, 1], state)
    kept = state.clone()
    torch.testing.assert_close(delta_step(x, state), out, atol=1e-12, rtol=0)
    torch.testing.assert_close(state, after, atol=1e-12, rtol=0)
    still = DeltaInputs(x.q, x.k, x.v, torch.zeros_like(x.g), torch.zeros_like(x.beta))
    delta_step(still, kept)
    assert torch.equal(kept, states(3)), "rows without decay and correction keep their state bit for bit"


def test_training_follows_decoding_in_the_same_process():
    """What they share is made by the first one of them."""
    x, length = inputs(11), 11
    rule._above.cache_clear()
    with torch.inference_mode():
        chunked(inputs(length), ChunkPlan.of([length], x.q.device))
    chunked(x, ChunkPlan.of([length], x.q.device))[0].sum().backward()


def test_narrow_inputs_are_computed_in_float32():
    x = inputs(40, torch.bfloat16)
    wide = DeltaInputs(*(y.detach().double() for y in (x.q, x.k, x.v, x.g, x.beta)))
    out, state = chunked(x, ChunkPlan.of([40], x.q.device), want_state=True)
    exact, last = recurrent(wide, [40])
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(state.double(), last, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("lengths", [[1, 2, 7], [2]])
def test_the_convolution_sees_no_token_of_another_sequence(lengths):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(sum(lengths), 6, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, generator=rng, dtype=torch.float64, requires_grad=True)
    parts = [F.conv1d(F.pad(part.T, (3, 0)), weight[:, None], groups=6).T for part in x.split(lengths)]
    expected, found = F.silu(torch.cat(parts)), causal_conv(x, weight, lengths, {})
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(x.shape, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(found, (x, weight), upstream), torch.autograd.grad(expected, (x, weight), upstream)
    )


def test_an_unknown_version_of_the_kernels_is_refused(monkeypatch, tmp_path):
    package = tmp_path / "fla" / "ops"
    package.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "gated_delta_rule.py").write_text("def chunk_gated_delta_rule(q, k, v, g, beta, lengths): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    rule.flash_rule.cache_clear()
    try:
        with pytest.raises(rule.ConfigError, match="version of flash-linear-attention is not supported"):
            rule.flash_rule()
    finally:
        rule.flash_rule.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]  # else transformers' classes, imported later, would call this package
