"""The RMSNorm of CPUs against autograd in float64, with the compiled kernels and without."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megarl.kernels import cpu
from megarl.models import norm


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shape", [(7, 1, 32), (5, 2, 3, 16), (1, 1, 8)], ids=str)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_output_and_gradient_equal_autograd(shape, dtype, tol, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu, "kernels_for", lambda x, width: None)
    monkeypatch.setattr(norm, "_BLOCK", 3 * shape[-1])  # several blocks, the last one short
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator).to(dtype)
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    reference = F.rms_norm(exact[0], shape[-1:], exact[1], 1e-6)
    out = norm._RMSNorm.apply(*inputs, 1e-6)
    expected = torch.autograd.grad(reference, exact, upstream.double())
    found = torch.autograd.grad(out, inputs, upstream)
    for ours, theirs in zip((out, *found), (reference, *expected), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=tol, rtol=tol)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_a_zero_centered_weight_is_added_to_one(dtype, tol, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu, "kernels_for", lambda x, width: None)
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=True)
    layer, generator = norm.RMSNorm(config, 32, 1e-6), torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(7, 32, generator=generator).to(dtype) for _ in range(2))
    layer.weight.data = torch.randn(32, generator=generator).to(dtype) / 256
    exact = [t.detach().double().requires_grad_() for t in (x, layer.weight)]
    reference = F.rms_norm(exact[0], (32,), 1 + exact[1], 1e-6)
    out = layer(x.requires_grad_())
    expected = torch.autograd.grad(reference, exact, upstream.double())
    found = torch.autograd.grad(out, [x, layer.weight], upstream)
    assert out.dtype == found[0].dtype == found[1].dtype == dtype
    for ours, theirs in zip((out, *found), (reference, *expected), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=tol, rtol=tol)


def test_a_small_zero_centered_weight_is_not_rounded_away():
    weight = torch.full((16,), 1 / 512, dtype=torch.bfloat16)
    assert (norm.zero_centered(weight) == 1 + 1 / 512).all(), "in bf16 the sum would be 1"
