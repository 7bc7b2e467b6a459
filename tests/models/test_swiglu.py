"""SwiGLU in blocks against the plain formula."""

import pytest
import torch
import torch.nn.functional as F

from megarl.models import swiglu


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


def test_gradcheck_and_no_rows():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu._SwiGLU.apply, (x,))
    empty = torch.randn(0, 8, requires_grad=True)
    swiglu._SwiGLU.apply(empty).sum().backward()
    assert empty.grad.shape == (0, 8)
