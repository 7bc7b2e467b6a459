"""Grouped experts against Megatron's, which compute one after another, and against the products of each group."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.models.layers.experts.training import GroupedExperts, grouped_linear
from tests.dist import fresh_parallel, run_distributed
from tests.models.sequential import sequential_experts
from tests.rollout.cases import build

SIZES = {"empty group": [3, 0, 4, 1], "first ones empty": [0, 0, 5, 0], "no rows": [0, 0, 0, 0]}


@pytest.fixture
def parallel():
    fresh_parallel()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 16), ("float32", 12), ("float32", 6), ("float64", 16)])
def test_each_row_meets_the_weight_of_its_group(sizes, dtype, width):
    kind, random = getattr(torch, dtype), torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=random).to(kind) for shape in ((sum(sizes), width), (4, 8, width)))
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    found, wanted = [], []
    for many, results in ((True, found), (False, wanted)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        each = zip(a.split(sizes), b, strict=True)
        out = grouped_linear(a, b, ends) if many else torch.cat([F.linear(*pair) for pair in each])
        (out * torch.linspace(-1, 1, out.numel()).view_as(out).to(kind)).sum().backward()
        results += [out, a.grad, b.grad]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)  # the same products; sums may be in another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_experts_equal_those_computed_one_after_another(parallel, dtype):
    experts = build("mixtral", hf={"num_hidden_layers": 1}, dtype=dtype)[0].decoder.layers[0].mlp.experts
    oracle = sequential_experts(experts)
    counts, random = torch.tensor([5, 0, 9, 2]), torch.Generator().manual_seed(1)
    rows, probs = torch.randn(16, 64, generator=random).to(dtype), torch.rand(16, generator=random)
    results = []
    for module in (experts, oracle):
        inputs = [rows.clone().requires_grad_(), probs.clone().requires_grad_()]
        out, bias = module(inputs[0], counts, inputs[1])
        assert bias is None
        out.square().sum().backward()
        results.append([out, *(each.grad for each in inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    for name in ("linear_fc1", "linear_fc2"):
        parts = [getattr(expert, name).weight.grad for expert in oracle.local_experts]
        torch.testing.assert_close(getattr(experts, name).weight.grad, torch.cat(parts))
    assert experts.linear_fc1.weight.grad.view(4, -1)[1].abs().max() == 0  # an expert without rows has a gradient


class Operations(TorchDispatchMode):
    """Counts operations that are kernels on a GPU: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or func in VIEWS)
        return func(*args, **(kwargs or {}))


VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default, torch.ops.aten.new_empty.default}


def test_a_layer_takes_as_many_operations_with_any_number_of_experts(parallel):
    found = {}
    for experts in (4, 64):
        layer = build("qwen3_moe", hf={"num_hidden_layers": 1, "num_experts": experts}, dtype=torch.bfloat16)[0]
        tokens = torch.randn(32, 1, 64).bfloat16().requires_grad_()
        with Operations() as forward:
            out = layer.decoder.layers[0].mlp(tokens)[0]
        with Operations() as backward:
            out.backward(torch.ones_like(out))
        found[experts] = forward.count, backward.count
    print(found)
    assert found[4] == found[64]


def places(layouts: list[dict]) -> list[tuple[list, list]]:
    """The slices that grouped experts and Megatron's have in a checkpoint, without their values."""
    from megarl.training.tensor_slices import places_of

    found = []
    for layout in layouts:
        fresh_parallel(**layout)
        ours: GroupedExperts = (
            build("qwen3_moe", hf={"num_hidden_layers": 1}, **layout)[0].decoder.layers[0].mlp.experts
        )
        states = [module.sharded_state_dict("mlp.experts.") for module in (ours, sequential_experts(ours))]
        found.append(
            tuple(
                sorted(
                    (place.key, place.whole, place.offset, place.shape, sharded.replica_id)
                    for sharded in state.values()
                    if torch.is_tensor(sharded.data)
                    for place in places_of(sharded)
                )
                for state in states
            )
        )
    return found


@pytest.mark.procs
def test_places_in_a_checkpoint_are_those_of_experts_one_after_another():
    layouts = [{"ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2, "etp": 1}, {}]
    for rank in run_distributed(places, 2, 120, layouts):
        for ours, theirs in rank:
            assert ours == theirs
            assert len(ours) > 4
