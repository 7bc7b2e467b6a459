"""The Triton kernels of mixtures of experts against float64: on a GPU as they are, elsewhere in Triton's interpreter.

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
from megarl.kernels import experts_gpu, gpu, layers_gpu
from megarl.models.layers.experts import training
from megarl.models.layers.experts.training import GroupedExperts, TokenDispatcher
from megarl.models.layers.mlp.swiglu import SwiGLU
from megarl.models.rows import route_by_expert, route_of_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: One rounding to 8 bits, and float32's errors before it. The interpreter does not round to bf16, it cuts off.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: (2.0**-8 if DEVICE == "cuda" else 2.0**-7) + 3e-5}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "layer_kernels", lambda *tensors: layers_gpu)
    monkeypatch.setattr(gpu, "expert_kernels", lambda rows: experts_gpu)


def draw(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=rng).to(DEVICE, dtype)


def draw_map(count, experts, each):
    """Each token's experts, as a router marks them: bool [count, experts]."""
    chosen = draw(count, experts).topk(each, 1).indices
    return torch.zeros(count, experts, dtype=torch.bool, device=DEVICE).scatter_(1, chosen, True)


def assert_rounded_once(found, exact):
    """Sums of numbers of both signs are as exact as the numbers are."""
    assert found.dtype in TOLERANCES
    assert found.shape == exact.shape
    atol = 1e-5 * float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCES[found.dtype], atol=atol)


def assert_with_gradients(ours, formula, *inputs):
    """The result of `ours`, and the gradients of the inputs, are those of `formula` in float64."""
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    inputs = [x.detach().requires_grad_() for x in inputs]
    found, exact = ours(*inputs), formula(*exact_inputs)
    assert_rounded_once(found.detach(), exact.detach())
    upstream = draw(*found.shape, dtype=found.dtype, seed=1)
    found.backward(upstream)
    exact.backward(upstream.double())
    for one, other in zip(inputs, exact_inputs, strict=True):
        assert one.grad.dtype == one.dtype
        assert_rounded_once(one.grad, other.grad)


@each_dtype
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("count", "each", "width"), [(1, 1, 1), (9, 3, 40), (17, 8, 96), (3, 2, 2048), (2, 4, 5000), (0, 2, 16), (4, 2, 0)]
)
def test_sums_of_rows(count, each, width, kind, dtype):
    rows = draw(2 * count * each + 1, width, dtype=dtype)
    places = torch.randint(len(rows), (count, each), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = experts_gpu.sum_rows(rows, places.to(kind))
    assert found.dtype == dtype
    assert_rounded_once(found, rows.double()[places].sum(1))


def test_places_below_zero_have_no_row():
    rows, places = draw(4, 24), torch.tensor([[2, -1, 0], [-1, -1, -1]], dtype=torch.int32, device=DEVICE)
    rows[3] = float("nan")  # what the row before the first would be, counted from the end
    found = experts_gpu.sum_rows(rows, places)
    assert torch.equal(found, torch.stack([rows[2] + rows[0], torch.zeros_like(rows[0])]))


def test_sums_are_in_the_order_of_places():
    big = float(2**25)  # beside which float32 has no 1
    rows = torch.tensor([[big], [1.0], [-big]], device=DEVICE)
    found = experts_gpu.sum_rows(rows, torch.tensor([[0, 1, 2], [0, 2, 1]], device=DEVICE))
    assert found.flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16], ids=str)
@pytest.mark.parametrize(
    ("counts", "out", "width"), [((3, 0, 21, 16), 40, 72), ((0, 0), 16, 16), ((17,), 1, 130)], ids=str
)
def test_gradients_of_weights_are_added(counts, out, width, dtype):
    """To what is there; rows after those of the last expert may be anything. The interpreter multiplies no bf16."""
    ends = torch.tensor(counts).cumsum(0)
    grads, rows = draw(int(ends[-1]) + 2, out, dtype=dtype), draw(int(ends[-1]) + 2, width, dtype=dtype)
    grads[-2:], rows[-2:] = float("nan"), float("inf")
    total = draw(len(counts), out, width)
    exact = total.double()
    for expert, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
        of = slice(end - count, end)
        exact[expert] += grads[of].double().T @ rows[of].double()
    tiles = experts_gpu.PRODUCTS._replace(out=32, width=64, tokens=16)  # several blocks in each direction
    experts_gpu.add_products(grads, rows, ends.to(DEVICE, torch.int32), total, tiles)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)  # products of 16 bits are exact in float32


@pytest.mark.parametrize(("count", "experts", "each"), [(1, 1, 1), (13, 8, 2), (40, 128, 8), (6, 4, 4), (0, 4, 2)])
def test_places_are_those_of_each_token_by_expert(count, experts, each):
    routing = draw_map(count, experts, each)
    of, tokens = routing.T.nonzero().unbind(1)
    route = route_by_expert(tokens, routing, each, draw(1))
    assert route.places.shape == (count, each)
    assert torch.equal(tokens[route.places], torch.arange(count, device=DEVICE)[:, None].expand(-1, each))
    assert torch.equal(of[route.places], routing.nonzero()[:, 1].view(count, each))  # its experts, ascending


@each_dtype
def test_rows_of_tokens_and_back(dtype):
    count, each, width = 19, 4, 72
    routing = draw_map(count, 16, each)
    tokens = routing.T.nonzero()[:, 1]
    route = route_by_expert(tokens, routing, each, draw(1, dtype=dtype))
    assert_with_gradients(route.spread, lambda x: x[tokens], draw(count, width, dtype=dtype))
    formula = lambda x: x.new_zeros(count, width).index_add(0, tokens, x)  # noqa: E731
    assert_with_gradients(lambda x: route.collect(x, count), formula, draw(count * each, width, dtype=dtype))


@each_dtype
def test_tokens_with_different_numbers_of_rows(dtype):
    count, each, width = 11, 3, 24
    order = torch.randperm(count * each, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    order = order[(order // each != 4) & (order % 5 != 0)]  # a token has none, and others one or two
    route, tokens = route_of_slots(order, count, each, draw(1, dtype=dtype)), order // each
    assert_with_gradients(route.spread, lambda x: x[tokens], draw(count, width, dtype=dtype))
    formula = lambda x: x.new_zeros(count, width).index_add(0, tokens, x)  # noqa: E731
    assert_with_gradients(lambda x: route.collect(x, count), formula, draw(len(order), width, dtype=dtype))


def test_rows_in_another_order_and_back():
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    route = route_of_slots(order, 15, 1, draw(1))
    assert_with_gradients(route.spread, lambda x: x[order], draw(15, 40))
    assert_with_gradients(route.inverse().spread, lambda x: x[order.argsort()], draw(15, 40))


def scaled_formula(x, scale):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up * scale[:, None]


@each_dtype
@pytest.mark.parametrize("shape", [(1, 2), (5, 24), (67, 2 * 33), (9, 2 * 768), (2, 2 * 2049), (0, 16)], ids=str)
def test_scaled_swiglu(shape, dtype):
    x, scale = draw(*shape, dtype=dtype) * 4, draw(shape[0], seed=2)
    assert_with_gradients(SwiGLU(SimpleNamespace()), scaled_formula, x, scale)


@each_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
def test_bad_numbers_stay_bad(bad, dtype):
    """None may become a number that training goes on with."""
    x, one = draw(2, 8, dtype=dtype), torch.ones(2, device=DEVICE)
    x[0, 3] = bad
    assert not experts_gpu.sum_rows(x, torch.tensor([[1, 0]], device=DEVICE)).isfinite().all()
    for found in (layers_gpu.swiglu(x, one), *layers_gpu.scaled_swiglu_backward(x, x[:, :4].contiguous(), one)):
        assert not found.isfinite().all()


def test_the_same_tensors_give_the_same_bits():
    x, scale, places = draw(300, 128), draw(300), torch.randint(300, (70, 8), device=DEVICE)
    for call in (
        lambda: (experts_gpu.sum_rows(x, places),),
        lambda: layers_gpu.scaled_swiglu_backward(x, x[:, 64:].contiguous(), scale),
    ):
        for one, other in zip(call(), call(), strict=True):
            assert torch.equal(one, other)


def test_every_size_of_blocks_gives_the_same_numbers():
    for case in benchmark.expert_cases(5, DEVICE, benchmark.Mixture(hidden=40, ffn=24, each=3)):
        with mock.patch.object(gpu, "layer_kernels", return_value=None):
            expected = case.torch()
        for launch in benchmark.CHOICES:
            for one, other in zip(case.kernel(launch=launch), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


EXPERTS, EACH, WIDTH = 8, 2, 48


def layer(dtype):
    """A dispatcher and experts of a process without groups, whose weights are drawn."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=group, expt_tp=group, tp_ep=group)
    config = SimpleNamespace(
        hidden_size=WIDTH,
        moe_ffn_hidden_size=40,
        moe_router_topk=EACH,
        params_dtype=dtype,
        expert_tensor_parallel_size=1,
        tensor_model_parallel_size=1,
        expert_model_parallel_size=1,
    )
    experts = GroupedExperts(EXPERTS, config, groups).to(DEVICE)
    for seed, weight in enumerate(experts.parameters()):
        weight.data = draw(*weight.shape, dtype=dtype, seed=seed) / 6
    return TokenDispatcher(EXPERTS, config, groups), experts


def pass_through(dtype, parts=None):
    """The output of a layer, and the gradients of tokens, probabilities and weights."""
    dispatcher, experts = parts or layer(dtype)
    tokens = draw(23, 1, WIDTH, dtype=dtype).requires_grad_()
    routing = draw_map(23, EXPERTS, EACH)
    probs = (draw(23, EXPERTS).softmax(1) * routing).requires_grad_()
    rows, chosen = dispatcher.dispatch_preprocess(tokens, routing, probs)
    rows, counts, chosen = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, chosen))
    rows, _ = experts(rows, counts, chosen)
    out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
    out.backward(draw(*out.shape, dtype=dtype, seed=1))
    return [out.detach(), tokens.grad, probs.grad, *(weight.grad for weight in experts.parameters())]


def test_a_layer_of_experts_is_that_of_torchs_operations():
    with mock.patch.object(experts_gpu, "sum_rows", wraps=experts_gpu.sum_rows) as summed:
        found = pass_through(torch.float32)
    assert summed.call_count == 2  # forward and backward
    with (
        mock.patch.object(gpu, "layer_kernels", return_value=None),
        mock.patch.object(gpu, "expert_kernels", return_value=None),
    ):
        expected = pass_through(torch.float32)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_of_experts_go_into_their_buffers(monkeypatch):
    """In two micro-batches, and never through a gradient in the weights' dtype."""
    monkeypatch.setattr(training, "is_one_kernel", lambda weight, dtype: True)
    expected = [2 * grad.float() for grad in pass_through(torch.float32)[3:]]
    dispatcher, experts = layer(torch.float32)
    buffers = [torch.ones_like(weight) for weight in experts.parameters()]
    for weight, buffer in zip(experts.parameters(), buffers, strict=True):
        weight.main_grad, weight.grad_added_to_main_grad = buffer, False
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))  # as Megatron's does
    for _ in range(2):
        pass_through(torch.float32, (dispatcher, experts))
    assert all(weight.grad_added_to_main_grad for weight in experts.parameters())
    for buffer, grad in zip(buffers, expected, strict=True):
        torch.testing.assert_close(buffer - 1, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes 9 GB")
def test_more_numbers_than_32_bits_count():
    count, width = 180_000, 24_576
    x = torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16)
    end, scale = x[-4:].clone(), torch.rand(count, device=DEVICE)
    assert torch.equal(layers_gpu.swiglu(x, scale)[-4:], layers_gpu.swiglu(end, scale[-4:].contiguous()))
    places = torch.arange(count, device=DEVICE)[:, None]
    assert torch.equal(experts_gpu.sum_rows(x, places)[-4:], end)
