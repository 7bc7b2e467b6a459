"""Several teachers: each scores the prompts that are its own, one after the other on the device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megarl.config.training import TeacherConfig
from megarl.data.batch import Batch, Jagged
from megarl.runtime.context import Seeds
from megarl.runtime.roles import TeacherRole
from megarl.system.metrics import Metrics
from megarl.system.offload_schedule import PARAMETERS, PARTS, OffloadSchedule

NAMES = ["code", None, "math", "math", "code"]


class Engine:
    """A model whose log-prob of every token is `value`, and which notes who is on the device when it works."""

    parts = frozenset({PARAMETERS})

    def __init__(self, value: float, others: list[Engine]) -> None:
        self.value, self.held, self.others, self.calls = value, frozenset({PARAMETERS}), others, []
        others.append(self)

    def hold(self, *parts: str) -> None:
        self.held = frozenset(parts)

    def logprobs(self, samples: Batch, temperature: float, entropy: bool = True) -> tuple[Jagged]:
        self.calls.append((samples["uid"], sum(bool(engine.held) for engine in self.others)))
        assert self.held
        tokens = samples["response_ids"]
        return (tokens.like(self.value + tokens.values.float()),)


def make(offloads: bool) -> tuple[TeacherRole, dict[str, Engine], Metrics]:
    engines: list[Engine] = []
    teachers = {name: Engine(value, engines) for name, value in {"math": 100.0, "code": 200.0, "art": 300.0}.items()}
    if offloads:
        teachers["math"].hold()
        teachers["code"].hold()
    models = {name: {"path": name, "weight": float(name == "math")} for name in teachers}
    c = SimpleNamespace(
        config=SimpleNamespace(teacher=TeacherConfig(models=models)),
        offload=OffloadSchedule(),
        all_sum=torch.clone,
        metrics=Metrics(),
        seeds=Seeds(0),
        temperature=1.0,
    )
    return TeacherRole(teachers, c, offloads=PARTS if offloads else ()), teachers, c.metrics


@pytest.mark.parametrize("offloads", [False, True])
def test_each_prompt_is_scored_by_its_own_teacher_in_the_order_of_the_batch(offloads):
    role, engines, metrics = make(offloads)
    samples = Batch(
        {"response_ids": Jagged.from_list([torch.arange(i + 1) for i in range(len(NAMES))])},
        {
            "uid": [f"p{i}" for i in range(len(NAMES))],
            "row": [{} if name is None else {"teacher": name} for name in NAMES],
            "data_source": ["there"] * len(NAMES),
        },
    )
    with role._c.offload.phase("generate") if offloads else nullcontext():
        assert not offloads or not any(engine.held for engine in engines.values())
    found = role.log_probs(samples)
    bases = [200, 100, 100, 100, 200]
    assert [row.tolist() for row in found.unbind()] == [[b + k for k in range(i + 1)] for i, b in enumerate(bases)]
    assert engines["math"].calls == [(["p1", "p2", "p3"], 1 if offloads else 3)]
    assert engines["code"].calls == [(["p0", "p4"], 1 if offloads else 3)]
    assert not engines["art"].calls, "nobody asks a teacher that has no prompt"
    assert metrics.result() == pytest.approx({"teacher/math": 0.6, "teacher/code": 0.4, "teacher/art": 0.0})
