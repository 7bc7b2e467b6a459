"""SwiGLU in blocks against the plain formula."""

import pytest
import torch
import torch.nn.functional as F

from megarl.models.layers.mlp import swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 100, 1 << 19])
def test_equals_the_plain_formula_bit_for_bit(monkeypatch, dtype, block):
    monkeypatch.setattr(swiglu, "_BLOCK", block)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(13, 1, 24, generator=rng).to(dtype).requires_grad_()
    grad = torch.randn(13, 1, 12, generator=rng).to(dtype)
    found = swiglu._SwiGLU.apply(x)
    found.backward(grad)
    got, x.grad = x.grad, None
    gate, up = x.chunk(2, dim=-1)
    want = F.silu(gate) * up
    want.backward(grad)
    assert torch.equal(found, want)
    assert torch.equal(got, x.grad)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_widths_that_the_compiled_kernels_take(dtype, tolerance):
    rng = torch.Generator().manual_seed(0)
    x, grad = torch.randn(5, 2, 64, generator=rng).to(dtype), torch.randn(5, 2, 32, generator=rng).to(dtype)
    exact = x.double().requires_grad_()
    want = torch.autograd.grad(swiglu._SwiGLU.apply(exact), exact, grad.double())[0]
    got = torch.autograd.grad(swiglu._SwiGLU.apply(x.requires_grad_()), x, grad)[0]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_gradcheck_and_no_rows():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu._SwiGLU.apply, (x,))
    for width in (8, 64):
        empty = torch.randn(0, width, requires_grad=True)
        swiglu._SwiGLU.apply(empty).sum().backward()
        assert empty.grad.shape == (0, width)
