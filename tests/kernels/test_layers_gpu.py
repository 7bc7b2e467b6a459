"""The Triton kernels of layers against float64: on a GPU as they are, elsewhere in Triton's interpreter.

make triton-test     # where Triton is not installed
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
    elif os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed: make triton-test")

from megarl.benchmarks import layers as benchmark
from megarl.kernels import gpu, layers_gpu
from megarl.models.layers.mlp.swiglu import SwiGLU
from megarl.models.norm import RMSNorm, _KernelRMSNorm  # Megatron imports Triton
from megarl.models.rope import apply_rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
#: One rounding to 8 bits, and float32's errors before it. The interpreter does not round to bf16, it cuts off.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: (2.0**-8 if DEVICE == "cuda" else 2.0**-7) + 3e-5}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "layer_kernels", lambda *tensors: layers_gpu)


def draw(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=rng).to(DEVICE, dtype)


def assert_rounded_once(found, exact):
    """Sums of numbers of both signs are as exact as the numbers are."""
    assert found.dtype in TOLERANCES
    assert found.shape == exact.shape
    atol = 1e-5 * float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCES[found.dtype], atol=atol)


def assert_with_gradients(ours, formula, *inputs):
    """The result of `ours`, and the gradients of those inputs that want one, are those of `formula` in float64."""
    exact_inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    found, exact = ours(*inputs), formula(*exact_inputs)
    assert_rounded_once(found.detach(), exact.detach())
    upstream = draw(*found.shape, dtype=found.dtype, seed=1)
    found.backward(upstream)
    exact.backward(upstream.double())
    for one, other in zip(inputs, exact_inputs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_rounded_once(one.grad, other.grad)


def swiglu_formula(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rope_formula(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def norm_formula(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def kernel_norm(x, weight):
    return _KernelRMSNorm.apply(x, weight, EPS, layers_gpu)


def tables(tokens, half, dtype):
    angles = draw(tokens, half).double() * 3
    return angles.cos().to(dtype), angles.sin().to(dtype)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 2), (5, 1, 24), (3, 2 * 33), (2, 2, 2 * 2049), (0, 16)], ids=str)
def test_swiglu(shape, dtype):
    x = (draw(*shape, dtype=dtype) * 4).requires_grad_()
    assert_with_gradients(SwiGLU(SimpleNamespace()), swiglu_formula, x)


@each_dtype
@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, of the interpreter
def test_swiglu_of_gates_that_exp_cannot_take(dtype):
    gate = torch.tensor([-1000.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1000.0], dtype=dtype, device=DEVICE)
    x = torch.cat([gate, torch.ones_like(gate)])[None].requires_grad_()
    assert_with_gradients(SwiGLU(SimpleNamespace()), swiglu_formula, x)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 80), (37, 5, 128), (2, 2, 4096), (0, 4, 16), (4, 0, 16)], ids=str)
def test_rope(shape, dtype):
    x = draw(*shape, dtype=dtype).requires_grad_()
    assert_with_gradients(apply_rope, rope_formula, x, *tables(shape[0], shape[2] // 2, dtype))


@each_dtype
def test_rope_of_heads_inside_a_projection(dtype):
    """Heads with gaps between tokens and between heads, and a gradient whose last dimension is not contiguous."""
    projection = draw(6, 4, 5, 16, dtype=dtype)
    cos, sin = tables(6, 8, dtype)
    inner = projection[:, :, 2].requires_grad_()
    assert not inner.is_contiguous()
    assert_with_gradients(apply_rope, rope_formula, inner, cos, sin)
    turned = projection[0].permute(2, 1, 0)[:6].requires_grad_()
    out = apply_rope(turned[..., :4], cos[:, :2], sin[:, :2])
    assert out.is_contiguous()
    assert_rounded_once(out.detach(), rope_formula(turned[..., :4].detach().double(), cos[:, :2], sin[:, :2]))


@each_dtype
@pytest.mark.parametrize(
    "shape", [(1, 8), (7, 1, 64), (5, 3, 128), (67, 16), (3, 5120), (2, 2048), (2, 16_384), (0, 32)], ids=str
)
def test_rms_norm(shape, dtype):
    weight = draw(shape[-1], dtype=dtype).requires_grad_()
    assert_with_gradients(kernel_norm, norm_formula, draw(*shape, dtype=dtype).requires_grad_(), weight)


@each_dtype
@pytest.mark.parametrize(("rows", "width"), [(200, 96), (203, 128), (11, 3000)])
def test_programs_of_a_norm_take_rows_in_turn(monkeypatch, rows, width, dtype):
    monkeypatch.setattr(layers_gpu, "PROGRAMS", 3)
    weight = draw(width, dtype=dtype).requires_grad_()
    assert_with_gradients(kernel_norm, norm_formula, draw(rows, width, dtype=dtype).requires_grad_(), weight)


def test_a_frozen_weight_has_no_gradient():
    weight = draw(48)
    assert_with_gradients(kernel_norm, norm_formula, draw(5, 48).requires_grad_(), weight)


def test_the_norm_of_models_takes_heads_inside_a_projection():
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False), 16, eps=EPS).to(DEVICE)
    heads = draw(6, 1, 4, 5, 16, dtype=torch.bfloat16)[:, :, :, 2].requires_grad_()
    found = norm(heads)
    assert type(found.grad_fn).__name__ == "_KernelRMSNormBackward"
    found.sum().backward()  # a gradient of one number that stands for all
    assert_rounded_once(found.detach(), norm_formula(heads.detach().double(), norm.weight.detach().double()))
    assert heads.grad.shape == heads.shape


def test_rows_beyond_the_widest_block_are_torchs():
    width = 2 * 16_384
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False), width, eps=EPS).to(DEVICE)
    assert "Kernel" not in type(norm(draw(2, width)).grad_fn).__name__


def test_the_same_tensors_give_the_same_bits():
    x, grad, weight = draw(300, 128), draw(300, 128, seed=1), draw(128)
    first = layers_gpu.rms_norm_backward(x, grad, weight, EPS)
    for one, other in zip(first, layers_gpu.rms_norm_backward(x, grad, weight, EPS), strict=True):
        assert torch.equal(one, other)


def test_every_size_of_blocks_gives_the_same_numbers():
    for case in benchmark.cases(5, DEVICE, benchmark.Sizes(40, 24, 3, 2, 16)):
        with mock.patch.object(gpu, "layer_kernels", return_value=None):
            expected = case.torch()
        for launch in benchmark.CHOICES:
            for one, other in zip(case.kernel(launch=launch), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


@each_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
def test_bad_numbers_stay_bad(bad, dtype):
    """None may become a number that training goes on with."""
    x = draw(2, 8, dtype=dtype)
    x[0, 3] = bad
    good = torch.ones_like(x)
    for found in (
        layers_gpu.rms_norm(x, good[0], EPS),
        *layers_gpu.rms_norm_backward(x, good, good[0], EPS),
        layers_gpu.rope(x[:, None], good[:, :4], good[:, :4], 1.0),
        layers_gpu.swiglu(x),
    ):
        assert not found.isfinite().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="takes 18 GB")
def test_more_numbers_than_32_bits_count():
    rows, width = 180_000, 12_288
    x = torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)
    weight, end = x[0].clone(), x[-4:].clone()
    assert torch.equal(layers_gpu.swiglu(x)[-4:], layers_gpu.swiglu(end))
    given = torch.randn(rows, width // 2, device=DEVICE, dtype=torch.bfloat16)
    assert torch.equal(layers_gpu.swiglu_backward(x, given)[-4:], layers_gpu.swiglu_backward(end, given[-4:]))
    assert torch.equal(layers_gpu.rms_norm(x, weight, EPS)[-4:], layers_gpu.rms_norm(end, weight, EPS))
    of_end = layers_gpu.rms_norm_backward(end, end, weight, EPS)[0]
    assert torch.equal(layers_gpu.rms_norm_backward(x, x, weight, EPS)[0][-4:], of_end)
    cos, sin = tables(rows, 64, torch.bfloat16)
    turned = layers_gpu.rope(x.view(rows, 96, 128), cos, sin, 1.0)[-4:]
    assert torch.equal(turned, layers_gpu.rope(end.view(4, 96, 128), cos[-4:], sin[-4:], 1.0))
