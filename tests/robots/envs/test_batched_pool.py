"""Many environments in one simulator process: real processes, with a simulator that fails as it is told."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.robots.data.demonstrations import Demonstration
from megarl.robots.envs import Answer, BatchedPool, Failure, SimulatorError, SimulatorSettings, open_pool
from megarl.robots.envs.messages import TurnAnswers, check_turn
from megarl.robots.rollout.experts import demonstrate
from megarl.robots.rollout.play import Player
from megarl.robots.simulators.protocol import Outcome, Recording, TaskSpec
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError
from megarl.system.plain import Malformed
from tests.robots.envs.test_pool import kill_all
from tests.robots.rollout.test_play import LINE, RAW, Steps, letters, starts, told

LINES = f"{Path(__file__).resolve().parents[1] / 'simulators/lines.py'}:Lines"
SLOW = np.full((2, 2), 0.1, np.float32)  # two environment steps that do not reach the end

pytestmark = [pytest.mark.procs, pytest.mark.usefixtures("forked_simulators")]


@contextlib.contextmanager
def pool_of(rows: int, *, batched: bool = True, **given: Any) -> Iterator[Any]:
    own = {"name": LINES if batched else LINE, "workers": rows, "batched": batched, "retries": 0, "limit": 7}
    with open_pool(SimulatorSettings.model_validate(own | {"answer_s": 20.0, "construct_s": 30.0} | given)) as pool:
        yield pool


def all_answers(pool: BatchedPool) -> dict[int, Answer]:
    """The answers of all slots that were called."""
    found: dict[int, Answer] = {}
    while pool.busy:
        found |= pool.answers(1.0)
    return found


def begun(pool: BatchedPool, trials: list[int]) -> None:
    for slot, trial in enumerate(trials):
        pool.begin(slot, "left", trial)
    all_answers(pool)


def moved(pool: BatchedPool, slots: list[int]) -> dict[int, Answer]:
    for slot in slots:
        pool.act(slot, SLOW)
    return all_answers(pool)


def episodes(rows: int, *, batched: bool, record: Recording | None = None, **given: Any) -> tuple[list[Any], list[Any]]:
    """Twelve episodes of two tasks, by a policy that draws its steps from what it sees: what they show, and clips."""
    with pool_of(rows, batched=batched, **given) as pool:
        player = Player(pool, Steps(), WorkerGroup.alone(), RAW, letters, halves=True, on_error="fail")
        played, counts = player.play(starts(12), record=record)
    assert counts.steps == sum(e.finish_step for e in played) == pool.counts.steps
    return told(played), [e.clip["front"].tolist() for e in played if e.clip]


def test_episodes_and_clips_are_those_of_a_pool_of_processes(tmp_path) -> None:
    """Also where the process ends once in the middle, and all episodes in flight are played again."""
    record = Recording(("front",), 4)
    expected = episodes(2, batched=False, record=record, told="go to {trial}")
    assert len(expected[1]) == 12
    for rows in (1, 5):
        assert episodes(rows, batched=True, record=record, told="go to {trial}") == expected
    failing = {"wrong": "exit", "once": str(tmp_path / "once"), "at": 4, "retries": 1, "row": 1}
    with pool_of(5, **failing) as pool:
        player = Player(pool, Steps(), WorkerGroup.alone(), RAW, letters, halves=True, on_error="fail")
        played, _ = player.play(starts(12))
        assert pool.counts.failures == {"crash": 1}
    assert [tuple(e) for e in told(played)] == [tuple(e) for e in episodes(2, batched=False)[0]]


def test_demonstrations_are_those_of_a_pool_of_processes() -> None:
    """Experts are asked in some rows while others have their next action."""

    def shown(*, batched: bool) -> list[Demonstration]:
        with pool_of(2, batched=batched) as pool:
            return list(demonstrate(pool, [("left", 3), ("right", 0), ("left", 1)], noise=0.1, seed=5))

    with pool_of(2) as pool:
        unfinished = demonstrate(pool, [("left", 3), ("right", 0), ("left", 1)], noise=0.1, seed=5)
        next(unfinished)
        unfinished.close()
        begun(pool, [1, 2])
        assert set(moved(pool, [0, 1])) == {0, 1}, "the pool can be used again"
    one, other = shown(batched=False), shown(batched=True)
    assert len(one) == 3
    for first, second in zip(one, other, strict=True):
        assert first.task == second.task
        assert first.actions.tobytes() == second.actions.tobytes()
        assert first.states.tobytes() == second.states.tobytes()


def test_a_row_whose_numbers_are_not_finite_fails_by_itself() -> None:
    with pool_of(3, wrong="state", row=1) as pool:
        begun(pool, [1, 2, 3])
        found = moved(pool, [0, 1, 2])
        failure = found[1]
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.task, failure.trial, failure.chunks) == ("state", "left", 2, 0)
        assert failure.text == "the state is not finite at [0] of 2 numbers"
        assert [found[slot].observation.state[0] for slot in (0, 2)] == pytest.approx([0.3, 0.5])
        assert all(isinstance(answer, Outcome) for answer in moved(pool, [0, 2]).values())
        assert pool.counts.failures == {"state": 1}


def test_a_process_that_ends_takes_all_its_episodes_and_in_the_end_the_run() -> None:
    with pool_of(2, wrong="exit", at=0, max_restarts=2) as pool:
        begun(pool, [1, 2])
        found = moved(pool, [0, 1])
        assert [(one.kind, one.trial) for one in found.values()] == [("crash", 1), ("crash", 2)]
        assert "the physics engine gives up" in found[0].output
        begun(pool, [3, 4])
        with pytest.raises(SimulatorError, match="the simulator's process failed 2 times in a row"):
            moved(pool, [0, 1])


def test_a_turn_may_be_larger_than_the_buffer_of_the_socket() -> None:
    """In the same pool: an entry's fields are those of its kind, and a process without episodes is replaced."""
    with pool_of(2, max_restarts=2) as pool:
        begun(pool, [1, 2])
        for slot in (0, 1):
            pool.act(slot, np.full((70_000, 2), 0.01, np.float32))  # 1.1 MB
        group = pool._process.process.pid
        os.killpg(group, signal.SIGSTOP)  # so that it reads nothing while the buffer becomes full
        threading.Timer(0.2, os.killpg, (group, signal.SIGCONT)).start()
        assert {answer.executed for answer in all_answers(pool).values()} == {7}
        pool.begin(0, "left", 0)
        unread = {"kind": "failed", "slot": 0, "problem": "state", "text": "lost", "executed": "many"}
        assert pool._take(TurnAnswers([unread], {}, {}, {}))[0].text == "lost"
        assert pool._failed("crash", "it ended") == {}
        with pytest.raises(SimulatorError, match=r"failed 2 times in a row(?s:.*)it ended again"):
            pool._failed("crash", "it ended again")


def test_an_episode_that_another_process_plays_differently_fails() -> None:
    """A row that moves by chance is left out; the other one, which began later, goes on where it was."""
    with pool_of(2, wrong="chance", at=0, row=1, retries=1) as pool:
        pool.begin(1, "left", 2)
        all_answers(pool)
        moved(pool, [1])
        pool.act(1, SLOW)
        pool.begin(0, "left", 1)
        all_answers(pool)
        moved(pool, [0, 1])
        kill_all(pool._process.process.pid)
        found = moved(pool, [0, 1])
        assert found[1].kind == "differs"
        assert found[0].observation.state.tolist() == pytest.approx([0.5, 4])


def test_a_step_waits_until_all_episodes_in_flight_have_one() -> None:
    with pool_of(2) as pool:
        begun(pool, [1, 2])
        pool.act(0, SLOW)
        assert pool.answers(0.1) == {}
        pool.act(1, SLOW)
        assert set(all_answers(pool)) == {0, 1}


def test_what_the_constructor_raises_ends_the_run() -> None:
    with pool_of(2, wrong="construct") as pool:
        pool.begin(0, "left", 0)
        with pytest.raises(SimulatorError, match=r"could not be constructed(.|\n)*meshes are missing"):
            all_answers(pool)


def test_the_least_recently_used_simulator_makes_room_but_none_with_an_episode() -> None:
    with pool_of(2, kept=1) as pool:
        pool.begin(0, "left", 0)
        pool.begin(1, "right", 0)
        all_answers(pool)
        assert pool.counts.constructions == {"left": 1, "right": 1}
        assert moved(pool, [0, 1])[0].executed == 2
        for task in ("right", "left"):
            for slot in pool.slots:
                pool.begin(slot, task, 0)
            all_answers(pool)
        assert pool.counts.constructions == {"left": 2, "right": 1}


def test_only_simulators_of_that_form_are_batched() -> None:
    for name, batched, fix in (("libero", True, "isaaclab, maniskill, reach"), ("isaaclab", False, "set it to true")):
        with pytest.raises(ConfigError, match=fix) as found:
            SimulatorSettings(name=name, batched=batched).check("robot.simulator")
        assert found.value.where == "robot.simulator.batched"


SPEC = TaskSpec("left", "go left", 5, 6, 2, 2, {})
STEP = {"kind": "step", "slot": 0, "executed": 2, "success": False, "over": False, "progress": None, "sum": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entries": []}, "must have a list of as many entries, not a list of 0"),
        ({"entries": [STEP | {"slot": 1}]}, "must have slot 0 and kind step or failed, not slot 1 and"),
        ({"entries": [STEP | {"executed": 3}]}, "the number of actions executed"),
        ({"entries": [STEP | {"success": True}]}, "succeeded but is not over"),
        ({"entries": [{"kind": "failed", "slot": 0, "problem": "crash", "text": ""}]}, "`problem` of a failed slot"),
        ({"seconds": {"physics": "long"}}, 'seconds of "physics"'),
        ({"call": "step"}, "but turn was called"),
    ],
)
def test_an_invalid_answer_is_malformed(changes, message) -> None:
    arrays = {"states": np.zeros(2, np.float32)}
    valid = {"call": "turn", "entries": [STEP], "seconds": {}}
    assert list(check_turn(valid, arrays, [(0, "step")], {0: SPEC}, {0: 2}).states) == [0]
    with pytest.raises(Malformed, match=message):
        check_turn(valid | changes, arrays, [(0, "step")], {0: SPEC}, {0: 2})
    with pytest.raises(Malformed, match="float32"):
        check_turn(valid, {"states": np.zeros(3, np.float32)}, [(0, "step")], {0: SPEC}, {0: 2})
