"""What ranks send for each layer in passes of real engines, against the plan's formulas T4 to T7 (campaign).

The difference between models of four and of two layers leaves out what happens once in a pass: embedding, logits and
metrics. A rank may send 3% more bytes: with sequence parallelism gradients of norms and of latents' down projections,
with experts the router's weights. With cp it is 3% times cp, because a rank has fewer tokens and as many parameters.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig
from tests.dist import run_distributed
from tests.planning.planned import H100, IDEAL
from tests.training.cases import hf_config, make_engine, outputs, train

SAMPLES, LENGTH = 4, 128
DEPTHS = (2, 4)
#: Formula, and the process groups of which it counts the messages, by their names in Megatron.
GROUPS = {
    "T4": {"TENSOR_MODEL_PARALLEL_GROUP"},
    "T5": {"CONTEXT_PARALLEL_GROUP"},
    "T6": {"EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"},
    "T7": {"PIPELINE_MODEL_PARALLEL_GROUP"},
}
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("dense", {"tp": 2}, ["T4"]),
    ("dense", {"tp": 2, "sp": True}, ["T4"]),
    ("dense", {"cp": 2}, ["T5"]),
    ("dense", {"pp": 2}, ["T7"]),
    ("moe", {"tp": 2, "sp": True}, ["T4", "T6"]),
    ("moe", {"tp": 2, "sp": True, "ep": 2, "etp": 1}, ["T4", "T6"]),
    ("moe", {"cp": 2}, ["T5"]),
    ("moe", {"ep": 2}, ["T6"]),
    ("latent", {"cp": 2}, ["T5"]),
    ("latent", {"tp": 2}, ["T4"]),
    ("latent", {"tp": 2, "sp": True}, ["T4"]),
    ("latent", {"tp": 2, "cp": 2}, ["T4", "T5"]),
    ("latent", {"tp": 2, "cp": 2, "sp": True}, ["T4"]),
]


def ranks_of(parallel: ParallelConfig) -> int:
    """Number of ranks of a layout: two at least."""
    return max(2, parallel.model_parallel_size)


def cases(size: int) -> list[tuple[str, dict[str, Any], list[str]]]:
    """The cases whose layouts have this number of ranks."""
    return [case for case in CASES if ranks_of(ParallelConfig(**case[1])) == size]


class Sent(TorchDispatchMode):
    """Counts steps of rings and messages, and the bytes that this rank sends in them, by group. An all-reduce has two
    steps, a gather and a scatter.

    Not counted are broadcasts (of metrics and results), shapes that stages send each other on CPUs only, and the bytes
    of experts' numbers of tokens. In place of a scatter of uneven parts gloo has a reduction for each of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func.name().partition("::")
        if space == "c10d" and not name.startswith(("recv", "barrier", "broadcast")):
            groups = [
                each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
            ]
            group = ProcessGroup.unbox(groups[0])
            given = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)][-1]
            if group.size() > 1 and (given.is_floating_point() or name != "send"):
                self._count(name, group, given)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, group: ProcessGroup, given: torch.Tensor) -> None:
        size, kind = group.size(), name.strip("_")
        self.steps[group.group_desc] += {"allreduce": 2, "reduce": 1 / size}.get(kind, 1)
        if given.is_floating_point():
            others = (size - 1) / size
            share = {"allreduce": 2 * others, "send": 1, "allgather": size - 1, "allgather_base": size - 1}
            self.nbytes[group.group_desc] += given.numel() * given.element_size() * share.get(kind, others)


def sent() -> list[dict]:
    """Steps and bytes by group of a pass for log-probs and of an update: for each case and depth."""
    from tests.training.test_equal_lengths import batch_of

    results: list[dict] = []
    for model, sizes, _ in cases(torch.distributed.get_world_size()):
        results.append({})
        for layers in DEPTHS:
            engine = make_engine(model, ParallelConfig(**sizes), layers=layers)
            engine.config = engine.config.model_copy(update={"micro_batch_tokens": SAMPLES * LENGTH})
            batch = batch_of(*SAMPLES * [LENGTH])
            if engine.layout.dp_size > 1:
                batch = batch.split([SAMPLES // 2] * 2)[engine.layout.dp_rank]
            for phase, run in (("forward", outputs), ("update", train)):
                with Sent() as counted:
                    run(engine, batch)
                results[-1][f"{phase} {layers}"] = [dict(counted.steps), dict(counted.nbytes)]
    return results


def planned(model: str, sizes: dict[str, Any], layers: int, phase: str, formula: str) -> tuple[float, float]:
    """Steps and bytes of the plan: on links without limit whose latency is one second, seconds are steps."""
    from megarl.models.hf import facts_of
    from megarl.planning.passes import ModelPass
    from megarl.planning.workload import Share

    parallel = ParallelConfig(**sizes)
    engine = EngineConfig(micro_batch_tokens=SAMPLES * LENGTH)
    links, given = replace(H100, node_gb_s=1e30), replace(IDEAL, node_hop_us=1e6)
    facts = facts_of(hf_config(model, num_hidden_layers=layers))
    plan = ModelPass(facts, parallel, ranks_of(parallel), engine, "fp32", links, given)
    share = Share(SAMPLES // (ranks_of(parallel) // parallel.model_parallel_size), 1, LENGTH - 1)
    costs = plan.forward(share) if phase == "forward" else plan.update(share, 1, 1)
    chosen = [cost for cost in costs if cost.formula == formula]
    return sum(cost.seconds for cost in chosen), sum(cost.bytes for cost in chosen)


def total(ranks: list[list[dict[str, float]]], formula: str) -> tuple[float, float]:
    """Steps and bytes of all ranks in the groups of a formula."""
    steps, nbytes = (sum(rank[part].get(name, 0) for rank in ranks for name in GROUPS[formula]) for part in (0, 1))
    return steps, nbytes


@pytest.mark.campaign("memory")
@pytest.mark.procs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_send_what_is_planned(size):
    ranks = run_distributed(sent, size, 600)
    wrong = []
    for number, (model, sizes, formulas) in enumerate(cases(size)):
        for formula, phase in itertools.product(formulas, ("forward", "update")):
            if formula == "T7" and phase == "update":
                continue  # the mode does not see what the last stage sends back
            plans = [planned(model, sizes, layers, phase, formula) for layers in DEPTHS]
            shallow, deep = (total([rank[number][f"{phase} {layers}"] for rank in ranks], formula) for layers in DEPTHS)
            if formula == "T7":  # only the first of two stages sends, and its bytes do not depend on its layers
                counted, expected = shallow, plans[0]
            else:  # the mean of the ranks, which have unequal numbers of tokens for their experts
                counted = tuple((more - less) / size for less, more in zip(shallow, deep, strict=True))
                expected = tuple(more - less for less, more in zip(*plans, strict=True))
            print(model, sizes, formula, phase, counted, expected)
            most = 1 + 0.03 * sizes.get("cp", 1)
            if counted[0] != pytest.approx(expected[0]) or not 1 - 1e-6 <= counted[1] / expected[1] <= most:
                wrong.append((model, sizes, formula, phase, counted, expected))
    assert wrong == []
