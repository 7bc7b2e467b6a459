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
from megarl.disaggregated.buffer.channel import SentSamples
from megarl.disaggregated.buffer.core import GroupInfo
from megarl.disaggregated.in_order_checkpoint import BufferedStep, read_buffered_step
from megarl.runtime.resume_compatibility import describe_buffered, refuse_other_sampling, steps_held
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics

GROUPS, SAMPLES = 5, 2
SAVED, STEP = 3, 5  # the checkpoint of step 3 has what was drawn for step 5
PARALLEL = RunConfig(name="run").actor.parallel
HANDOVERS = (
    Handover("rollout", "draw", ("response_ids", "note"), ("frozen", "train"), "rollout"),
    Handover("reward", "draw", ("score", "optional"), ("train",), "rollout"),
)


def layout(replica: int, replicas: int, *, lead: bool = True) -> SimpleNamespace:
    return SimpleNamespace(dp_rank=replica, dp_size=replicas, is_lead=lead)


def drawn(replica: int, replicas: int, step: int = STEP) -> BufferedStep:
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
        HANDOVERS[0].key: SentSamples("rollout", groups, responses),
        HANDOVERS[1].key: SentSamples("reward", groups, scores),
    }
    return BufferedStep(given, metrics, step)


def saved(folder: Path, replicas: int) -> None:
    for replica in range(replicas):
        for name, content in drawn(replica, replicas).files(layout(replica, replicas), SAVED).items():
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("before", [1, 2, 3, 7])
@pytest.mark.parametrize("now", [1, 2, 4, 7])
def test_every_replica_gives_what_it_would_have_drawn(tmp_path, before, now):
    saved(tmp_path, before)
    metrics = Metrics()
    for replica in range(now):
        found, wanted = (
            read_buffered_step(tmp_path, SAVED, STEP, before, layout(replica, now), HANDOVERS),
            drawn(replica, now),
        )
        assert list(found.given) == list(wanted.given)
        for key, sent in found.given.items():
            assert (sent.node, sent.groups) == (wanted.given[key].node, wanted.given[key].groups)
            assert sent.samples.to_bytes() == wanted.given[key].samples.to_bytes()
        metrics.merge(found.metrics)
    assert metrics.result() == {"score": sum(range(GROUPS)) / GROUPS}


def test_files_and_fields_of_older_versions_are_read(tmp_path):
    handovers = (Handover("rollout", "draw", ("response_ids", "surplus_logp"), ("train",), "rollout"),)
    older = drawn(0, 1).given[HANDOVERS[0].key].samples
    older.set("drawn_logp", older["response_ids"])
    groups = drawn(0, 1).given[HANDOVERS[0].key].groups
    step = BufferedStep({handovers[0].key: SentSamples("rollout", groups, older)}, Metrics(), STEP)
    for name, content in step.files(layout(0, 1), SAVED).items():
        (tmp_path / name.replace("generated_", "drawn_")).write_bytes(content)
    found = read_buffered_step(tmp_path, SAVED, STEP, 1, layout(0, 1), handovers)
    samples = found.given[handovers[0].key].samples
    assert samples["surplus_logp"].values.tolist() == older["drawn_logp"].values.tolist()
    state = {"order": "in_order", "steps": 1, "parts": 1, "fields": {"rollout": ["response_ids", "drawn_logp"]}}
    refuse_other_sampling(3, state | {"settings": {}}, config(), placement(handovers=handovers))


def test_only_the_first_rank_of_a_replica_writes_and_gives(tmp_path):
    saved(tmp_path, 1)
    assert drawn(0, 1).files(layout(0, 1, lead=False), SAVED) == {}
    assert read_buffered_step(tmp_path, SAVED, STEP, 1, layout(0, 1, lead=False), HANDOVERS).given == {}


def placement(*, apart: bool = True, handovers: tuple[Handover, ...] = HANDOVERS) -> Placement:
    roles = (Role.ACTOR,) if apart else (Role.ACTOR, Role.ROLLOUT)
    teams = [TeamPlan("train", roles, 1, 0, PARALLEL, ())]
    if apart:
        teams.append(TeamPlan("draw", (Role.ROLLOUT,), 2, 1, PARALLEL, ()))
    return Placement(tuple(teams), handovers if apart else ())


FIELDS = {"rollout": ["response_ids", "note"], "reward": ["score", "optional"]}
SETTINGS = {"data.batch_size": 8, "rollout.sampling.temperature": 0.5}


def config(*, size: int = 8, temperature: float = 0.5, staleness: int = 1) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "async": {"max_staleness": staleness},
            "trainer": {"steps": 9},
            "data": {"batch_size": size},
            "rollout": {"sampling": {"temperature": temperature}},
        }
    )


def test_a_checkpoint_says_what_it_has_for_the_next_steps():
    wanted = {"order": "in_order", "steps": 1, "parts": 2, "fields": FIELDS, "settings": SETTINGS}
    assert describe_buffered(config(), placement(), 8) == wanted
    assert describe_buffered(config(), placement(), 9) is None
    assert describe_buffered(config(staleness=0), placement(), 8) is None
    assert describe_buffered(config(staleness=3), placement(), 5)["steps"] == 3
    assert describe_buffered(config(staleness=3), placement(), 7)["steps"] == 2


def test_the_last_checkpoint_of_a_run_as_ready_may_have_prompts_and_no_samples():
    ready = RunConfig.model_validate(config().model_dump() | {"async": {"max_staleness": 2, "order": "as_ready"}})
    held = [steps_held(describe_buffered(ready, placement(), step)) for step in (6, 7, 8, 9)]
    assert held == [2, 2, 1, 0]
    assert describe_buffered(ready, placement(), 9)["parts"] == 2


@pytest.mark.parametrize(("now", "good"), [(0, False), (1, False), (2, True), (3, True), (4, True)])
def test_a_run_keeps_what_is_left_of_the_steps_that_were_drawn(now, good):
    state = describe_buffered(config(staleness=3), placement(), 3)
    if good:
        refuse_other_sampling(3, state, config(staleness=now), placement())
        return
    with pytest.raises(ConfigError, match="samples for 3 steps") as error:
        refuse_other_sampling(3, state, config(staleness=now), placement())
    assert (error.value.where, error.value.allowed) == ("async.max_staleness", "2 or more")


@pytest.mark.parametrize(
    ("changed", "key", "before"),
    [({"size": 4}, "data.batch_size", "8"), ({"temperature": 1.0}, "rollout.sampling.temperature", "0.5")],
)
def test_what_was_drawn_is_not_trained_on_with_other_settings(changed, key, before):
    state = describe_buffered(config(), placement(), 3)
    refuse_other_sampling(3, state, config(staleness=0), placement())
    with pytest.raises(ConfigError) as error:
        refuse_other_sampling(3, state, config(**changed), placement())
    assert (error.value.where, error.value.allowed) == (key, before)
    assert f"train step 4 with {key}={before} and trainer.steps=4" in error.value.fix
    assert "unless optim.decay_steps is set" in error.value.fix


@pytest.mark.parametrize(("before", "now"), [("in_order", "as_ready"), ("as_ready", "in_order")])
def test_the_order_stays_while_samples_wait(before, now):
    def ordered(order: str) -> RunConfig:
        return RunConfig.model_validate(config().model_dump() | {"async": {"max_staleness": 2, "order": order}})

    state = describe_buffered(ordered(before), placement(), 3)
    refuse_other_sampling(3, state, ordered(before), placement())
    with pytest.raises(ConfigError, match="the order has changed") as error:
        refuse_other_sampling(3, state, ordered(now), placement())
    assert (error.value.where, error.value.allowed) == ("async.order", before)
    assert f"train steps 4 to 5 with async.order={before} and trainer.steps=5" in error.value.fix


@pytest.mark.parametrize(
    ("now", "where", "lacking"),
    [
        (placement(apart=False), "placement", "the rollout in the actor's team"),
        (
            placement(handovers=(Handover("rollout", "draw", ("response_ids", "text"), ("train",), "rollout"),)),
            "recipe",
            "text of rollout",
        ),
        (
            placement(handovers=(*HANDOVERS, Handover("greedy", "draw", ("greedy_score",), ("train",), "rollout"))),
            "recipe",
            "greedy_score of greedy",
        ),
    ],
)
def test_a_run_that_cannot_hand_it_over_is_refused(now, where, lacking):
    state = {"order": "in_order", "steps": 1, "parts": 1, "fields": FIELDS, "settings": {}}
    refuse_other_sampling(3, state, config(), placement())
    refuse_other_sampling(3, state, config(), placement(handovers=HANDOVERS[:1]))
    with pytest.raises(ConfigError) as error:
        refuse_other_sampling(3, state, config(), now)
    assert (error.value.where, error.value.found) == (where, lacking)
    assert "and trainer.steps=4" in error.value.fix
