"""Products with AMX; on a CPU without AMX all of these are skipped, and torch multiplies."""

from __future__ import annotations

import ctypes
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megarl.architectures.adapters import MODULE
from megarl.kernels import amx, build
from megarl.rollout.embedded.model import Recipe
from megarl.training import logprob, optimizer  # installs the changes of Megatron's source

from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication  # isort: skip

pytestmark = pytest.mark.skipif(not amx._has_tiles() or shutil.which("g++") is None, reason="no AMX or no C++ compiler")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected).abs().max() / expected.abs().max()).item()


def weight_with_buffer(rows: int, width: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(randn(rows, width))
    weight.main_grad = randn(rows, width).float()
    optimizer.add_gradients_in_products([torch.nn.ParameterList([weight])])
    return weight


def test_products_agree_with_float64():
    library = ctypes.CDLL(str(build._build(amx._SOURCE, shutil.which("g++"))))
    assert amx.check(library) is None


def test_a_row_does_not_depend_on_other_rows():
    """Nor on the block of tokens that it is computed in: rows of 32,768 numbers come in blocks of 32."""
    for rows, width in ((40, 96), (40, 1 << 15)):
        packed, x = amx.load().pack(randn(64, width)), randn(rows, width)
        whole = packed.multiply(x)
        for row in (0, 15, 16, 39):
            assert torch.equal(packed.multiply(x[row : row + 1])[0], whole[row])


def test_a_nan_stays_in_its_row():
    x = randn(3, 32)
    x[1, 5] = torch.nan
    assert amx.load().pack(randn(32, 32)).multiply(x).isnan().all(1).tolist() == [False, True, False]


def test_torch_multiplies_afterwards():
    """oneDNN uses the tiles too, and takes the shapes for granted that it has set in this thread."""
    x, weight = randn(33, 576), randn(96, 576)
    before = F.linear(x, weight)
    amx.load().pack(weight).multiply(x)
    assert torch.equal(F.linear(x, weight), before)


def test_many_rows_are_multiplied_by_torch_where_that_needs_no_second_copy(monkeypatch):
    rows, multiply = [], amx.PackedWeight.multiply
    monkeypatch.setattr(
        amx.PackedWeight, "multiply", lambda self, x, bias=None: rows.append(len(x)) or multiply(self, x, bias)
    )
    weight, x, recipe = torch.nn.Parameter(randn(96, 64)), randn(257, 64), Recipe(torch.bfloat16, 32)
    expected = x.double() @ weight.detach().double().t()
    experts = SimpleNamespace(weight=weight, stacked=weight.view(2, 48, 64)[:, :32])  # 32 outputs of each expert
    adapter = SimpleNamespace(enabled=True, whole=lambda weight: weight.detach().clone())
    product, of_cast = recipe.linear(weight), recipe.linear(torch.nn.Parameter(weight.detach().float()))
    for result in (product(x[:256]), product(x), of_cast(x)):
        assert error(result, expected[: len(result)]) < 1e-2  # rounded to bf16
    assert rows == [256, 257]
    rows.clear()
    of_experts = recipe.grouped(experts)(torch.cat((x, x[:256])), torch.tensor([257, 513]))
    assert error(of_experts[:257], expected[:, :32]) < 1e-2
    assert rows == [256]
    rows.clear()
    merged = recipe.layer(SimpleNamespace(weight=weight, bias=None, **{MODULE: adapter}))
    assert error(merged(x), expected) < 1e-2
    assert rows == [257]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_layers_add_gradients_to_the_buffer(elsewhere):
    """What a weight gets elsewhere is its gradient as before."""
    weight, x, up = weight_with_buffer(64, 96), randn(50, 96), randn(50, 64)
    expected = weight.main_grad.double() + up.double().t() @ x.double()
    out = LinearWithGradAccumulationAndAsyncCommunication.apply(x, weight, None, False, False, False, None, 0, None)
    loss = (out * up).sum()
    (loss + weight.sum() if elsewhere else loss).backward()
    assert error(weight.main_grad, expected) < 1e-6  # sums of exact products in float32
    assert torch.equal(weight.grad, torch.ones_like(weight)) if elsewhere else weight.grad is None


@pytest.mark.parametrize("chunk", [16, 1000])
def test_the_head_adds_its_gradient_to_the_buffer(chunk):
    weight, hidden, targets = weight_with_buffer(96, 32), randn(50, 32).requires_grad_(), torch.arange(50)
    exact = weight.detach().double().requires_grad_()
    oracle = torch.log_softmax(hidden.detach().double() @ exact.t(), -1).gather(1, targets[:, None]).sum()
    (slope,) = torch.autograd.grad(oracle, exact)
    before = weight.main_grad.double()
    logprob.linear_logprob(hidden, weight, targets, chunk_tokens=chunk)[0].sum().backward()
    assert weight.grad is None
    assert error(weight.main_grad.double() - before, slope) < 2e-2  # logits and their gradients are rounded to bf16


def test_other_weights_keep_their_gradients():
    odd, wide = torch.nn.Parameter(randn(40, 32)), torch.nn.Parameter(randn(32, 32).float())
    frozen = torch.nn.Parameter(randn(32, 32), requires_grad=False)
    for weight in (odd, wide):
        weight.main_grad = torch.zeros(weight.shape)
    optimizer.add_gradients_in_products([torch.nn.ParameterList([odd, wide, frozen])])
    assert not any(hasattr(weight, "add_gradient") for weight in (odd, wide, frozen))
