"""The loss kernels against the torch forms, which the tests of the algorithms hold to their formulas."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.losses import ppo, value_loss
from megarl.algorithms.losses.base import DualClipSettings
from megarl.kernels.losses import loss_kernels

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def both(loss_of, x: torch.Tensor, *others: torch.Tensor):
    """(loss, gradient for uneven weights, metrics) in float32 with the kernel, and in float64 without it."""
    for dtype in (torch.float32, torch.float64):
        leaf = x.detach().to(dtype, copy=True).requires_grad_()
        inputs = [leaf, *(other.to(dtype) for other in others)]
        assert (loss_kernels(*inputs) is not None) == (dtype == torch.float32)
        loss, metrics = loss_of(*inputs)
        loss.backward(torch.linspace(1, 2, loss.numel(), dtype=dtype).view(loss.shape))
        yield loss.detach().double(), leaf.grad.double(), metrics.result()


def same(kernel, reference) -> None:
    for mine, theirs in zip(kernel[:2], reference[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-6, atol=1e-6)
    assert kernel[2] == pytest.approx(reference[2], rel=1e-5, abs=1e-6, nan_ok=True)


def batch(seed: int, n: int, spread: float, masked: bool):
    g = torch.Generator().manual_seed(seed)
    x, y, z = (torch.randn(n, generator=g) for _ in range(3))
    mask = torch.rand(n, generator=g) < 0.6 if masked else torch.ones(n, dtype=torch.bool)
    y = x + spread * y
    return *(torch.where(mask, t, float("nan")) for t in (x, y, z)), mask


batches = st.builds(batch, st.integers(0, 999), st.integers(0, 100), st.sampled_from([0.3, 2.0, 40.0]), st.booleans())


@given(batches, st.sampled_from([None, 1.5, 3.0]), st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.28]))
@settings(max_examples=60, deadline=None)
def test_ppo(tensors, dual, low, high):
    x, y, z, mask = tensors
    cfg = DualClipSettings(dual_clip=dual, clip_low=low, clip_high=high)
    offsets = torch.tensor([0, len(x)])
    same(*both(lambda *args: ppo(*args, mask, cfg, offsets=offsets), x, y, z))


@given(batches, st.sampled_from([None, 0.1, 0.5]))
@settings(max_examples=60, deadline=None)
def test_value(tensors, clip):
    x, y, z, mask = tensors
    same(*both(lambda *args: value_loss(*args, mask, clip=clip), x, y, z))


def test_many_blocks_padded_and_not_contiguous():
    x, y, z, mask = batch(1, 301 * 257, 0.5, True)
    x, y, z, mask = (t.view(301, 257).t() for t in (x, y, z, mask))
    same(*both(lambda *args: ppo(*args, mask, DualClipSettings()), x, y, z))


@pytest.mark.parametrize(
    ("advantages", "mask"), [(torch.ones(2, 1), torch.ones(2, 3).bool()), (torch.ones(2, 3), torch.ones(2, 3))]
)
def test_other_shapes_and_masks_are_refused(advantages, mask):
    """The kernel would read past the end of the shorter one."""
    with pytest.raises(ValueError, match="one shape"):
        ppo(torch.zeros(2, 3), torch.zeros(2, 3), advantages, mask, DualClipSettings())


def test_gradient_where_nothing_is_clipped_yet():
    """On policy with a clip range of zero the gradient is still that of the policy gradient."""
    logp = torch.zeros(2, requires_grad=True)
    cfg = DualClipSettings(clip_low=0.0, clip_high=0.0)
    ppo(logp, torch.zeros(2), torch.tensor([1.0, -2.0]), torch.ones(2, dtype=torch.bool), cfg)[0].sum().backward()
    assert logp.grad.tolist() == [-1.0, 2.0]
