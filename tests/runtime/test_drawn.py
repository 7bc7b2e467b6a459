"""What was drawn ahead comes out of a checkpoint as it went in, in any number of replicas."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.config.run import RunConfig
from megarl.dag.placement import Handover, Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.data.batch import Batch, Jagged
from megarl.errors import ConfigError
from megarl.metrics import Metrics
from megarl.runtime.drawn import Drawn, describe_drawn, read_drawn, refuse_other_fields
from megarl.store.core import GroupInfo
from megarl.store.crossing import Gift

GROUPS, SAMPLES = 5, 2
PARALLEL = RunConfig(name="run").actor.parallel
HANDOVERS = (
    Handover("rollout", "draw", ("response_ids", "note"), ("frozen", "train"), "rollout"),
    Handover("reward", "draw", ("score", "optional"), ("train",), "rollout"),
)


def layout(replica: int, replicas: int, *, lead: bool = True) -> SimpleNamespace:
    return SimpleNamespace(dp_rank=replica, dp_size=replicas, is_lead=lead)


def drawn(replica: int, replicas: int) -> Drawn:
    """Groups `replica`, `replica + replicas`, ... of a step."""
    numbers = range(replica, GROUPS, replicas)
    rows = [(number, sample) for number in numbers for sample in range(SAMPLES)]
    names = {
        "uid": [f"p{number}" for number, _ in rows],
        "sample_id": [f"p{number}#{sample}" for number, sample in rows],
    }
    ids = Jagged.from_list([[number] * (sample + 1) for number, sample in rows], dtype=torch.int64)
    groups = [GroupInfo(f"p{n}", n, tuple(f"p{n}#{s}" for s in range(SAMPLES)), 10 * n) for n in numbers]
    notes = [{"of": number} for number, _ in rows]
    responses = Batch({"response_ids": ids}, {**names, "note": notes}, size=len(rows))
    scores = Batch({"score": torch.tensor([float(number) for number, _ in rows])}, names, size=len(rows))
    metrics = Metrics()
    metrics.mean("score", sum(numbers), len(numbers))
    given = {
        HANDOVERS[0].key: Gift("rollout", groups, responses),
        HANDOVERS[1].key: Gift("reward", groups, scores),
    }
    return Drawn(given, metrics)


def saved(folder: Path, replicas: int) -> None:
    for replica in range(replicas):
        for name, content in drawn(replica, replicas).files(layout(replica, replicas)).items():
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("now", [1, 2, 4])
def test_every_replica_gives_what_it_would_have_drawn(tmp_path, before, now):
    saved(tmp_path, before)
    metrics = Metrics()
    for replica in range(now):
        found, wanted = read_drawn(tmp_path, before, layout(replica, now), HANDOVERS), drawn(replica, now)
        assert list(found.given) == list(wanted.given)
        for key, gift in found.given.items():
            assert (gift.node, gift.groups) == (wanted.given[key].node, wanted.given[key].groups)
            assert gift.samples.to_bytes() == wanted.given[key].samples.to_bytes()
        metrics.merge(found.metrics)
    assert metrics.result() == {"score": sum(range(GROUPS)) / GROUPS}


def test_only_the_first_rank_of_a_replica_writes_and_gives(tmp_path):
    saved(tmp_path, 1)
    assert drawn(0, 1).files(layout(0, 1, lead=False)) == {}
    assert read_drawn(tmp_path, 1, layout(0, 1, lead=False), HANDOVERS).given == {}


def placement(*, apart: bool = True, handovers: tuple[Handover, ...] = HANDOVERS) -> Placement:
    roles = (Role.ACTOR,) if apart else (Role.ACTOR, Role.ROLLOUT)
    teams = [TeamPlan("train", roles, 1, 0, PARALLEL, ())]
    if apart:
        teams.append(TeamPlan("draw", (Role.ROLLOUT,), 2, 1, PARALLEL, ()))
    return Placement(tuple(teams), handovers if apart else ())


def test_a_checkpoint_says_what_it_has_for_the_next_step():
    config = RunConfig.model_validate({"name": "run", "async": {"max_staleness": 1}, "trainer": {"steps": 9}})
    fields = {"rollout": ["response_ids", "note"], "reward": ["score", "optional"]}
    assert describe_drawn(config, placement(), 8) == {"parts": 2, "fields": fields}
    assert describe_drawn(config, placement(), 9) is None
    assert describe_drawn(RunConfig(name="run"), placement(), 8) is None


@pytest.mark.parametrize(
    ("now", "lacking"),
    [
        (placement(apart=False), "the rollout in the team of the actor"),
        (
            placement(handovers=(Handover("rollout", "draw", ("response_ids", "text"), ("train",), "rollout"),)),
            "text of rollout",
        ),
    ],
)
def test_a_run_that_cannot_hand_it_over_is_refused(now, lacking):
    fields = {"rollout": ["response_ids", "note"], "reward": ["score", "optional"]}
    state = {"parts": 1, "fields": fields}
    refuse_other_fields(Path("step_3"), state, placement())
    refuse_other_fields(Path("step_3"), state, placement(handovers=HANDOVERS[:1]))
    with pytest.raises(ConfigError, match=lacking) as error:
        refuse_other_fields(Path("step_3"), state, now)
    assert error.value.where == "placement"
