"""Bytes that ranks send in passes of real engines, against the plan's formulas T4 to T7 (campaign)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.dist import run_distributed
from tests.training.cases import hf_config, make_engine, outputs, train

LAYERS, SAMPLES, PROMPT, RESPONSE = 2, 4, 1, 128
#: Layouts of two ranks, and the formulas of what they send.
LAYOUTS = {
    "tp": ({"tp": 2}, "T4"),
    "tp sp": ({"tp": 2, "sp": True}, "T4"),
    "cp": ({"cp": 2}, "T5"),
    "ep": ({"ep": 2}, "T6"),
    "pp": ({"pp": 2}, "T7"),
}


class Sent(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives of a ring, all-to-alls and messages, by kind."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._ring = (ranks - 1) / ranks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func.name().partition("::")
        if space == "c10d":
            share = {"allreduce_": 2 * self._ring, "send": 1.0}.get(name, self._ring)
            given = args[1] if "reduce_scatter" in name else args[0]
            tensors = [x for x in torch.utils._pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
            if not name.startswith(("recv", "broadcast", "barrier")):
                self.bytes[name] += share * sum(x.numel() * x.element_size() for x in tensors if x.is_floating_point())
        return func(*args, **(kwargs or {}))


def sent(model: str, sizes: dict) -> dict[str, float]:
    """Bytes that a rank sends in a pass for log-probs and in an update."""
    from megarl.config.model import ParallelConfig
    from tests.training.test_equal_lengths import batch_of

    engine = make_engine(model, ParallelConfig(**sizes), layers=LAYERS)
    engine.config = engine.config.model_copy(update={"micro_batch_tokens": SAMPLES * RESPONSE})
    batch, found = batch_of(*SAMPLES * [RESPONSE]), {}
    if engine.layout.dp_size > 1:
        batch = batch.split([SAMPLES // 2] * 2)[engine.layout.dp_rank]
    for name, run in (("forward", outputs), ("update", train)):
        with Sent(2) as counted:
            run(engine, batch)
        found[name] = dict(counted.bytes)
    return found


@pytest.mark.campaign("memory")
@pytest.mark.procs
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_ranks_send_the_planned_bytes(model, name):
    from megarl.config.model import ParallelConfig
    from megarl.config.training import EngineConfig
    from megarl.models.hf import facts_of
    from megarl.planning.assumptions import PlanAssumptions
    from megarl.planning.hardware import KINDS
    from megarl.planning.passes import ModelPass
    from megarl.planning.workload import Share

    sizes, formula = LAYOUTS[name]
    if model == "dense" and "ep" in sizes:
        pytest.skip("a dense model has no experts")
    facts, parallel = facts_of(hf_config(model, num_hidden_layers=LAYERS)), ParallelConfig(**sizes)
    samples = SAMPLES // (2 // parallel.model_parallel_size)
    engine = EngineConfig(micro_batch_tokens=SAMPLES * RESPONSE)
    plan = ModelPass(facts, parallel, 2, engine, "fp32", KINDS["h100"], PlanAssumptions())
    share = Share(samples, PROMPT, RESPONSE - PROMPT)
    found = run_distributed(sent, 2, 240, model, sizes)
    print(found)
    for way, costs in (("forward", plan.forward(share)), ("update", plan.update(share, 1, 1))):
        planned = sum(cost.bytes for cost in costs if cost.formula == formula)
        assert sum(found[0][way].values()) == pytest.approx(planned, rel=0.1), (way, found)
