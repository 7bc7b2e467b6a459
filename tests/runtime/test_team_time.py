"""How long a team works and waits, for whom and for what; and who bounds the step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megarl
from megarl.config.model import ParallelConfig
from megarl.dag.placement import Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.runtime import team_time
from megarl.runtime.rank_state import TeamContext
from megarl.runtime.team_time import AllTeams, TeamTime
from megarl.system.metrics import Metrics
from megarl.system.tracing import PhaseEvent

PLANS = tuple(
    TeamPlan(name, roles, devices, first, ParallelConfig(), ())
    for name, roles, devices, first in (
        ("train", (Role.ACTOR,), 1, 0),
        ("value", (Role.CRITIC,), 1, 1),
        ("draw", (Role.ROLLOUT,), 2, 2),
    )
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seconds."""
    now = [100]
    monkeypatch.setattr(team_time.time, "time_ns", lambda: now[0] * 10**9)
    return now


def of(name: str) -> TeamTime:
    placement = Placement(PLANS)
    return TeamTime(TeamContext(placement[name], placement))


def event(path: str, start: int, end: int, waits_for: str = "") -> PhaseEvent:
    return PhaseEvent(path, start * 10**9, end * 10**9, 1, waits_for)


def test_waits_are_told_apart_by_team_and_by_what_was_waited_for(clock):
    mine = of("value")
    mine.start_step()
    clock[0] = 110
    events = [
        event("await_start", 0, 90, "train"),  # before the first step
        event("step/take/wait", 100, 103, "draw"),
        event("step/take", 100, 104),
        event("step/take/wait", 104, 105, "train"),
        event("await_checkpoint", 108, 110, "train"),
    ]
    metrics = Metrics()
    mine.end_step(metrics, events, 500)
    assert metrics.result() == {
        "team/value/wait_s": 6.0,
        "team/value/busy_s": 4.0,
        "team/value/busy": 0.4,
        "team/value/wait_for/train_s": 3.0,
        "team/value/wait_for/draw_s": 3.0,
        "team/value/wait/samples_s": 4.0,
        "team/value/wait/weights_s": 0.0,
        "team/value/wait/checkpoint_s": 2.0,
        "team/value/tokens_per_s": 50.0,
    }


def test_waits_for_generation_are_also_recorded_under_their_earlier_name(clock):
    team, metrics = of("value"), Metrics()
    team.start_step()
    clock[0] = 110
    team.end_step(metrics, [event("step/await_generation", 103, 105, "draw")], None)
    numbers = metrics.result()
    assert (numbers["team/value/wait_s"], numbers["team/value/busy_s"]) == (2, 8)
    assert numbers["team/value/wait/generation_s"] == numbers["team/value/wait/drawn_s"] == 2


def test_a_team_that_may_start_again_tells_how_often_it_has(clock):
    plan = TeamPlan("score", (Role.REFERENCE,), 1, 0, ParallelConfig(), ())
    mine = TeamTime(TeamContext(plan, Placement((plan,)), restarts=2, begins_again=True))
    mine.start_step()
    metrics = Metrics()
    mine.end_step(metrics, [], None)
    assert metrics.result()["team/score/restarts"] == 2


def test_what_was_waited_for_once_is_there_in_every_later_step(clock):
    mine = of("value")
    mine.start_step()
    clock[0] = 110
    mine.end_step(Metrics(), [event("await_checkpoint", 108, 110, "train")], 0)
    metrics = Metrics()
    mine.start_step()
    clock[0] = 120
    mine.end_step(metrics, [], 70)
    assert metrics.result()["team/value/wait/checkpoint_s"] == 0
    assert metrics.result()["team/value/tokens_per_s"] == 7, "of this step"


@pytest.mark.parametrize(("name", "busy"), [("train", 10), ("value", 30)])
def test_only_the_step_of_the_leading_team_begins_when_it_says_so(clock, name, busy):
    mine = of(name)
    mine.start_step()
    mine.end_step(Metrics(), [], 0)
    clock[0] = 120
    mine.start_step()
    clock[0] = 130
    metrics = Metrics()
    mine.end_step(metrics, [], 0)
    assert metrics.result()[f"team/{name}/busy_s"] == busy


def test_the_rate_of_a_team_is_that_of_all_its_replicas_and_ranks_without_a_voice_count_none(clock):
    ranks, metrics = [of("draw") for _ in range(3)], Metrics()
    for rank in ranks:
        rank.start_step()
    clock[0] = 110
    for rank, tokens in zip(ranks, (300, 500, None), strict=True):
        rank.end_step(metrics, [], tokens)
    assert metrics.result()["team/draw/tokens_per_s"] == pytest.approx(80.0)


def test_the_busiest_team_bounds_the_step():
    teams = AllTeams(["train", "draw"])
    first = teams.bottleneck({"team/train/busy": 0.5})
    assert "perf/bottleneck/train" not in first, "nothing is known of the other team yet"
    numbers = {"team/train/busy": 0.5, "team/draw/busy": 0.9}
    assert teams.bottleneck(numbers) == {"perf/bottleneck/train": 0.0, "perf/bottleneck/draw": 1.0}


def test_a_team_that_tells_nothing_of_a_step_spent_nothing_on_it_and_is_as_busy_as_before():
    teams = AllTeams(["train", "draw"])
    teams.bottleneck({"team/train/busy": 0.5, "team/draw/busy": 0.9})
    assert teams.bottleneck({"team/train/busy": 0.95}) == {
        "team/draw/busy_s": 0.0,
        "team/draw/wait_s": 0.0,
        "team/draw/wait_for/train_s": 0.0,
        "perf/bottleneck/train": 1.0,
        "perf/bottleneck/draw": 0.0,
    }


def test_two_stretches_that_end_in_one_step_add_up(clock):
    mine, metrics = of("value"), Metrics()
    mine.start_step()
    for end, waited, tokens in ((110, 6, 100), (130, 0, 200)):
        clock[0] = end
        mine.end_step(metrics, [event("step/await_weights", end - waited, end, "train")], tokens)
    found = metrics.result()
    assert (found["team/value/busy_s"], found["team/value/wait_s"]) == (24, 6)
    assert found["team/value/busy"] == pytest.approx(24 / 30)
    assert found["team/value/tokens_per_s"] == pytest.approx(200 / 30)


def test_every_phase_that_waits_for_a_team_names_it():
    root = Path(megarl.__file__).parent
    calls = [
        call for path in root.rglob("*.py") for call in re.findall(r'phase\("(?:await_|wait").*', path.read_text())
    ]
    assert len(calls) > 8
    assert [call for call in calls if "waits_for=" not in call] == []
