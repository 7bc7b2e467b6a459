"""Demonstrations of scripted experts, played in real simulators' processes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.robots.data.demonstrations import Demonstration, OpenDemonstration
from megarl.robots.data.pictures import PicturePipeline
from megarl.robots.envs import SimulatorPool, SimulatorSettings
from megarl.robots.models.vla.actions import GRIPPER_RULES, ActionCodec, ActionTokens
from megarl.robots.models.vla.cloning import CloningExamples, cloning_statistics
from megarl.robots.rollout.experts import ExpertCounts, demonstrate, noises
from megarl.robots.simulators.protocol import Outcome
from megarl.system.errors import ConfigError
from tests.robots.envs.playback import play
from tests.robots.opened import opened

LINE = f"{Path(__file__).resolve().parents[1] / 'simulators/line.py'}:Line"
EPISODES = [(task, trial) for trial in range(3) for task in ("reach_red", "push_up")]
LIMITS = {"retries": 0, "answer_s": 20.0, "construct_s": 30.0}

pytestmark = [pytest.mark.procs, pytest.mark.usefixtures("forked_simulators")]


@contextlib.contextmanager
def pools(workers: int, name: str = "reach", **own: Any) -> Iterator[SimulatorPool]:
    with SimulatorPool(SimulatorSettings.model_validate({"name": name, "workers": workers} | LIMITS | own)) as pool:
        yield pool


def told(shown: Demonstration) -> tuple[Any, ...]:
    """All of it, as values that can be compared."""
    frames = {camera: value.tobytes() for camera, value in shown.frames.items()}
    return shown.task, frames, shown.states.tolist(), shown.actions.tolist()


def test_experts_show_the_same_whichever_process_is_faster() -> None:
    counts, done = ExpertCounts(), list[int]()
    with pools(1) as pool:
        alone = [told(one) for one in demonstrate(pool, EPISODES, noise=0.2, seed=5)]
    with pools(3) as pool:
        shown = list(demonstrate(pool, EPISODES, noise=0.2, seed=5, counts=counts, advance=done.append))
        first = list(itertools.islice(demonstrate(pool, EPISODES[2:], noise=0.2, seed=5), 1))
        again = list(demonstrate(pool, EPISODES[:1], noise=0.2, seed=6))  # the pool goes on after an early end
    assert [told(one) for one in shown] == alone
    assert [one.task for one in shown] == [task for task, _ in EPISODES]
    assert told(first[0]) == alone[2]
    assert told(again[0]) != alone[0]
    assert sum(done) == len(EPISODES)
    assert counts.solved == {"reach_red": 3, "push_up": 3}
    assert counts.steps == sum(map(len, shown))


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_what_is_recorded_is_the_experts_action_and_what_is_executed_has_the_noise(noise) -> None:
    with pools(1, tasks=["reach_blue"], speed=0.05) as pool:
        (shown,) = demonstrate(pool, [("reach_blue", 4)], noise=noise, seed=9)
    drawn = noises(9, "reach_blue", 4, len(shown), 3)[:-1, :2]
    way = np.diff(shown.states[:, :2], axis=0) / 0.05
    expected = np.clip(shown.actions[:-1, :2] + noise * drawn, -1, 1)
    np.testing.assert_allclose(way, expected, atol=2e-6)
    assert (np.abs(way - shown.actions[:-1, :2]).max() > 0.05) == (noise > 0)
    assert shown.frames["top"].shape == (len(shown), 32, 32, 3)
    assert not np.array_equal(shown.frames["top"][0], shown.frames["top"][-1])


def solved_again(
    pool: SimulatorPool, shown: list[OpenDemonstration], episodes: list[tuple[str, int]], bins: int
) -> int:
    """Episodes that the tokens of their demonstrations solve, in chunks of 5, without a look at what they come to."""
    chunk = 5
    codec = ActionCodec(ActionTokens(5000, bins), cloning_statistics(shown, GRIPPER_RULES["none"]).action)
    prompts = {task: [1] for task in pool.tasks}
    every = CloningExamples(shown, prompts, codec, PicturePipeline(32), cameras=["top"], chunk=chunk, states=np.asarray)
    start, solved = 0, 0
    for (task, trial), one in zip(episodes, shown, strict=True):
        # The last call, of the last action only: what is a hair short of success is not lost.
        asked = [*range(start, start + len(one), chunk), start + len(one) - 1]
        calls = every.batch(asked)["response_ids"].unbind()
        answers = play(pool, task, trial, [codec.to_actions(call.numpy()) for call in calls])
        solved += isinstance(answers[-1], Outcome) and answers[-1].success
        start += len(one)
    return solved


def test_tokens_of_demonstrations_solve_their_tasks_again() -> None:
    episodes = [(task, trial) for task in ("reach_green", "push_left", "push_up") for trial in range(8)]
    with pools(2) as pool:
        shown = [opened(one, "expert") for one in demonstrate(pool, episodes, noise=0, seed=0)]
        assert len(shown) == len(episodes)
        assert solved_again(pool, shown, episodes, bins=4096) == len(episodes)
        # The expert lowers the gripper a hair's breadth from the disc, where 256 bins may not let it.
        assert solved_again(pool, shown, episodes, bins=256) >= 20


def test_what_is_not_solved_or_fails_is_left_out_and_counted(tmp_path) -> None:
    episodes = [("left", trial) for trial in (0, 3, 4, 1)]
    counts = ExpertCounts()
    with pools(1, LINE, limit=3) as pool:
        shown = list(demonstrate(pool, episodes, noise=0, seed=0, counts=counts))
    assert [one.states[0, 0].item() for one in shown] == [pytest.approx(0.3), pytest.approx(0.4)]
    assert counts.unsolved == {"left": 2}
    counts = ExpertCounts()
    with pools(2, LINE, limit=3, wrong="exit", once=str(tmp_path / "once")) as pool:
        shown = list(demonstrate(pool, [("left", 3)] * 4, noise=0, seed=0, counts=counts))
    assert len(shown) == 3
    assert counts.describe() == ("experts solved 3 of 4 episodes in 9 environment steps; left out: 1 failed (crash 1)")


def test_one_episode_that_takes_long_holds_up_a_bounded_number_of_others(monkeypatch) -> None:
    monkeypatch.setattr("megarl.robots.rollout.experts._AHEAD", 1)
    with pools(2, LINE, limit=9) as pool:
        begun = list[int]()
        begin = pool.begin
        monkeypatch.setattr(pool, "begin", lambda slot, task, trial: (begun.append(trial), begin(slot, task, trial)))
        shown = demonstrate(pool, [("left", trial % 5) for trial in range(8)], noise=0, seed=0)
        next(shown)
        assert len(begun) <= 3
        assert len(list(shown)) == 7


def test_a_simulator_without_an_expert_is_refused_with_its_task(tmp_path) -> None:
    file = tmp_path / "mute.py"
    file.write_text(
        "from megarl.robots.simulators.reach import Reach\n\n\n"
        "class Mute(Reach):\n    def expert(self):\n        return None\n"
    )
    with pools(2, f"{file}:Mute") as pool:
        with pytest.raises(ConfigError) as caught:
            list(demonstrate(pool, EPISODES, noise=0, seed=0))
        assert not pool.busy
    for part in ("sft.train_files", "no scripted expert", "the task ", "fix:"):
        assert part in str(caught.value)


def test_noise_is_normal_and_of_the_episode_only() -> None:
    drawn = noises(3, "a", 7, 20000, 3)
    assert np.array_equal(drawn[:50], noises(3, "a", 7, 50, 3))
    assert abs(drawn.mean()) < 0.02
    assert abs(drawn.std() - 1) < 0.02
    assert abs((np.abs(drawn) < 1).mean() - 0.6827) < 0.01
    for other in ((4, "a", 7), (3, "b", 7), (3, "a", 8)):
        assert abs(np.corrcoef(drawn.ravel(), noises(*other, 20000, 3).ravel())[0, 1]) < 0.02
