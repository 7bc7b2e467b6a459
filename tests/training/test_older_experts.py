"""Training and checkpoints of experts that compute one after another, which is what they did in earlier versions."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.training import checkpoint
from tests.dist import fresh_layout, run_distributed
from tests.training import cases

LAYOUTS = [{"ep": 2}, {"tp": 2, "sp": True}]


def older_engine(layout: dict, distributed: bool):
    """An engine whose experts are Megatron's, with the weights that `engine` has."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megarl.models import build
    from tests.models.sequential import submodules

    class Older(SequentialMLP):
        def __init__(self, experts, config, pg_collection, name=None):  # the name: from megatron-core 0.19 on
            super().__init__(experts, config, submodules(experts), pg_collection)

    grouped, random = build.GroupedExperts, cases._random

    def fill(chunks, hf, seed):
        with mock.patch.object(build, "GroupedExperts", grouped):
            others = build.build_policy(hf, chunks[0].config)
        random(others, hf, seed)
        for chunk, other in zip(chunks, others, strict=True):
            weights = dict(other.named_parameters())
            for name, parameter in chunk.named_parameters():
                head, _, tail = name.partition("local_experts.")
                number, _, rest = tail.partition(".")
                weight = weights[head + rest]
                parameter.data.copy_(weight.split(len(parameter))[int(number or 0)])

    with mock.patch.object(build, "GroupedExperts", Older), mock.patch.object(cases, "_random", fill):
        return engine(layout, distributed)


def engine(layout: dict, distributed: bool, seed: int = 3):
    parallel = ParallelConfig(**layout)
    settings = EngineConfig(micro_batch_tokens=60, distributed_optimizer=distributed)
    optim = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)
    made = fresh_layout(parallel)
    return cases.make_engine("moe", parallel, layout=made, engine=settings, optim=optim, seed=seed, layers=2)


def steps(trained, first: int) -> list[dict]:
    layout = trained.layout
    batches = [cases.split_over(cases.make_batch(9, seed=first + k), layout.dp_rank, layout.dp_size) for k in (0, 1)]
    return [cases.train(trained, batch).result() for batch in batches]


def go_on(root: str, layouts: list[dict]) -> list[tuple]:
    found = []
    for number, layout in enumerate(layouts):
        distributed = number == 0
        older = older_engine(layout, distributed)
        first = steps(older, 0)
        folder = checkpoint.save(Path(root) / str(number), 2, {"actor": older}, {})
        first += steps(older, 2)  # another engine has other groups of ranks, which replace these
        fresh, other = steps(engine(layout, distributed), 0), engine(layout, distributed, seed=77)
        checkpoint.load(folder, {"actor": other})
        found.append((layout, first, fresh + steps(other, 2)))
    return found


@pytest.mark.procs
@pytest.mark.parametrize("layouts", [LAYOUTS[:1], pytest.param(LAYOUTS, marks=pytest.mark.campaign("teams"))], ids=len)
def test_training_equals_experts_one_after_another_and_goes_on_from_their_checkpoints(layouts, tmp_path):
    """Four steps: two from the start, two from the other's checkpoint with its optimizer state."""
    for rank in run_distributed(go_on, 2, 200, str(tmp_path), layouts):
        for layout, wanted, found in rank:
            for want, got in zip(wanted, found, strict=True):
                for key in ("loss", "samples", "actor/grad_norm"):
                    # Without optimizer state, or with a wrong step count, these differ by more than 1e-3.
                    assert got[key] == pytest.approx(want[key], rel=5e-6, abs=5e-6), (layout, key)
