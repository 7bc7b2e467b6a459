"""Episodes in real simulators' processes, played by a policy whose actions follow from what it is asked."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.batch import Batch
from megarl.robots.data.pictures import PIPELINES
from megarl.robots.envs import SimulatorPool, SimulatorSettings
from megarl.robots.rollout.episode import Episode, episode_values
from megarl.robots.rollout.play import EpisodeStart, Player, PlayError, View
from megarl.robots.rollout.policy import Chunk, PolicyCall
from megarl.robots.simulators.protocol import Observation, Outcome, Recording, TaskSpec
from megarl.system.comm import WorkerGroup

LINE = f"{Path(__file__).resolve().parents[1] / 'simulators/line.py'}:Line"
K, D = 2, 2

pytestmark = [pytest.mark.procs, pytest.mark.usefixtures("forked_simulators")]


class Steps:
    """Draws steps from the seed, and from what it sees."""

    blank = Chunk([9] * (K * D), [0.0] * (K * D), np.zeros((K, D), np.float32))

    def __init__(self) -> None:
        self.asked: list[list[tuple[float, int]]] = []

    def act(self, calls: Sequence[PolicyCall]) -> list[Chunk]:
        self.asked.append([(float(call.observation.state[0]), call.seed) for call in calls])
        return [self._chunk(call) for call in calls]

    def _chunk(self, call: PolicyCall) -> Chunk:
        draw = np.random.default_rng([call.seed, round(call.observation.state[0] * 1000), *call.prompt_ids])
        tokens = draw.integers(0, 20, K * D)
        actions = (tokens.reshape(K, D) / 40).astype(np.float32)
        return Chunk(tokens.tolist(), (-tokens / 10.0).tolist(), actions)


class Raw(View):
    """Everything, as it is."""

    def __call__(self, seen: Observation) -> Observation:
        return seen

    def of_task(self, spec: TaskSpec) -> TaskSpec:
        return spec


RAW = Raw((), PIPELINES["plain"])


def letters(instruction: str) -> list[int]:
    return [ord(letter) for letter in instruction]


def starts(count: int) -> list[EpisodeStart]:
    return [
        EpisodeStart(f"p{n}#0", ("left", "right")[n // 2 % 2], n % 5, [7, n % 3], lambda call, n=n: 100 * n + call)
        for n in range(count)
    ]


@contextlib.contextmanager
def players(workers: int, *, halves: bool = True, on_error: str = "fail", **given: Any) -> Iterator[Player]:
    own = {"name": LINE, "workers": workers, "retries": 0, "answer_s": 20.0, "construct_s": 30.0, "limit": 7}
    with SimulatorPool(SimulatorSettings.model_validate(own | given)) as pool:
        yield Player(pool, Steps(), WorkerGroup.alone(), RAW, letters, halves=halves, on_error=on_error)


def told(episodes: list[Episode]) -> list[Any]:
    """All of them, as values that can be compared."""
    return [
        (
            e.spec.name,
            e.trial,
            [seen.state.tolist() for seen in e.seen],
            [seen.frames["front"].tolist() for seen in e.seen],
            [chunk.token_ids for chunk in e.chunks],
            e.executed,
            e.success,
            e.progress,
            e.failure_kind,
        )
        for e in episodes
    ]


@pytest.fixture(scope="module")
def one_by_one() -> list[Any]:
    """Episodes of one slot."""
    with players(1) as player:
        return told(player.play(starts(12))[0])


@pytest.mark.parametrize("halves", [False, True])
def test_an_episode_is_the_same_whatever_is_played_beside_it(one_by_one, halves) -> None:
    done: list[int] = []
    with players(5, halves=halves) as player:
        episodes, counts = player.play(starts(12), done.append)
    assert told(episodes) == one_by_one
    assert sum(done) == 12
    assert counts.calls == sum(len(e.chunks) for e in episodes)
    assert counts.steps == sum(e.finish_step for e in episodes)
    assert {e.success for e in episodes} == {True, False}, "some reach the end, others the limit"
    for e in episodes:
        assert len(e.seen) == len(e.chunks) == len(e.executed)
        assert all(steps == K for steps in e.executed[:-1])
        assert e.finish_step == 7 or e.success


def batch_of(episodes: list[Episode]) -> Batch:
    samples = Batch({}, {"uid": [f"p{n}" for n in range(len(episodes))]}, size=len(episodes))
    return samples.with_values(episode_values(episodes, version=0))


def test_clips_are_of_the_simulators_frames_and_change_no_episode(one_by_one) -> None:
    record = Recording(("front",), 4)
    with players(3) as player:
        episodes, _ = player.play(starts(12), record=record)
        assert told(episodes) == one_by_one
        assert all(np.array_equal(e.clip["front"][-1], e.end.frames["front"]) for e in episodes if e.end)
        samples = batch_of(episodes)
        assert samples["clip/front"].lengths.tolist() == [min(4, e.finish_step + 1) for e in episodes]
        assert samples["clip/front"].values.shape[1:] == (4, 6, 3)
    with players(2, on_error="mark", wrong="raise", at=3, max_restarts=99) as player:
        episodes, _ = player.play(starts(4), record=record)
    lengths = batch_of(episodes)["clip/front"].lengths.tolist()
    assert [not n for n in lengths] == [bool(e.failure) for e in episodes]
    assert {bool(e.failure) for e in episodes} == {True, False}


def test_an_episode_may_be_told_something_of_its_own() -> None:
    with players(2, told="trial {trial}") as player:
        episodes, _ = player.play(starts(4))
    assert [e.instruction for e in episodes] == [f"trial {e.trial}" for e in episodes]
    assert [e.prompt_ids for e in episodes] == [letters(e.instruction) for e in episodes]
    with players(1) as player:
        (plain,), _ = player.play(starts(1))
    assert (plain.instruction, plain.prompt_ids) == ("", [7, 0])
    assert plain.chunks[0].token_ids != episodes[0].chunks[0].token_ids, "the policy is asked with it"


def test_a_clip_is_upright_and_nothing_else_is_done_to_it() -> None:
    frames = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    seen = Observation({}, np.zeros(1, np.float32))
    answers = {
        name: View((), PIPELINES[name]).of_answer(Outcome(seen, 1, True, True, clip={"top": frames}))
        for name in ("plain", "libero")
    }
    assert np.array_equal(answers["plain"].clip["top"], frames)
    assert np.array_equal(answers["libero"].clip["top"], frames[:, ::-1, ::-1])


def test_halves_take_turns_and_no_more_than_half_is_asked_at_a_time() -> None:
    with players(4) as player:
        player.play(starts(8))
        assert max(map(len, player.policy.asked)) == 2
    with players(4, halves=False) as player:
        player.play(starts(8))
        assert max(map(len, player.policy.asked)) == 4


def test_a_slot_goes_on_with_its_task_and_constructs_each_once() -> None:
    with players(2) as player:
        player.play(starts(12))
        player.play(starts(12))
        assert player.pool.counts.constructions == {"left": 2, "right": 2}


def test_what_is_asked_together_does_not_depend_on_a_process_that_is_replaced(tmp_path) -> None:
    asked = []
    for wrong in ("", "exit"):
        with players(3, wrong=wrong, once=str(tmp_path / "once"), retries=1) as player:
            player.play(starts(9))
            asked.append(player.policy.asked)
            assert sum(player.pool.counts.failures.values()) == bool(wrong)
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    ("wrong", "at", "kind"), [("exit", 2, "crash"), ("state", 0, "state"), ("frames", 3, "frames")]
)
def test_an_episode_whose_simulator_fails_is_left_out_and_the_others_are_as_before(
    one_by_one, tmp_path, wrong, at, kind
) -> None:
    with players(3, on_error="mark", wrong=wrong, at=at, once=str(tmp_path / "once")) as player:
        episodes, counts = player.play(starts(12))
    (failed,) = [n for n, e in enumerate(episodes) if e.failure]
    assert counts.failures == {kind: 1}
    assert episodes[failed].failure_kind == kind
    assert not episodes[failed].success
    assert not episodes[failed].executed_tokens().any()
    assert len(episodes[failed].chunks) == len(episodes[failed].seen) == len(episodes[failed].executed) >= 1
    others = [n for n in range(12) if n != failed]
    assert [told(episodes)[n] for n in others] == [one_by_one[n] for n in others]


def test_a_failure_ends_the_run_where_it_is_asked_to() -> None:
    with players(1, wrong="exit") as player, pytest.raises(PlayError) as caught:
        player.play(starts(1))
    text = str(caught.value)
    for part in ("p0#0", "left, trial 0", "the physics engine gives up", "robot.on_error=mark"):
        assert part in text


def test_a_batch_holds_tokens_of_executed_actions_and_what_was_seen() -> None:
    with players(3) as player:
        episodes, _ = player.play(starts(6))
    samples = Batch({}, {"uid": [f"p{n}" for n in range(6)]}, size=6).with_values(episode_values(episodes, version=4))
    for e, ids, mask, logp, front, state, ends in zip(
        episodes,
        *(
            samples[name].unbind()
            for name in ("response_ids", "response_mask", "rollout_logp", "frames/front", "states")
        ),
        samples["turn_ends"].unbind(),
        strict=True,
    ):
        tokens = [token for chunk in e.chunks for token in chunk.token_ids]
        assert ids.tolist() == tokens
        assert mask.tolist() == [place < e.finish_step * D for place in range(len(tokens))]
        assert torch.equal(logp, -ids / 10.0)
        assert front.shape == (len(e.chunks), 4, 6, 3)
        assert front.dtype == torch.uint8
        assert state[:, 1].tolist() == np.cumsum([0, *e.executed[:-1]]).tolist()
        assert ends.tolist() == [K * D * (call + 1) for call in range(len(e.chunks))]
    assert samples["success"].tolist() == [e.success for e in episodes]
    assert samples["finish_step"].tolist() == [e.finish_step for e in episodes]
    assert samples["task"] == ["left", "left", "right", "right", "left", "left"]
    again = Batch.from_bytes(samples.to_bytes())
    assert torch.equal(again["frames/front"].values, samples["frames/front"].values)


def test_an_episode_that_fails_at_its_reset_has_a_blank_call() -> None:
    with players(1, on_error="mark", wrong="state", at=0, max_restarts=50) as player:
        (episode,), _ = player.play(starts(1))
    assert math.isnan(episode.progress)
    samples = Batch({}, {"uid": ["p0"]}, size=1).with_values(episode_values([episode], version=0))
    assert samples["response_ids"].values.tolist() == [9] * (K * D)
    assert not samples["response_mask"].values.any()
    assert samples["frames/wrist"].values.shape == (1, 2, 2, 3)


def test_no_episodes_have_all_fields_of_tokens() -> None:
    samples = Batch({}, {"uid": []}, size=0).with_values(episode_values([], version=0))
    assert len(samples["response_ids"]) == len(samples["states"]) == 0


def _played() -> list[Any]:
    """On one of two ranks, of which the first has the simulators."""
    from megarl.system.comm import team_world

    world = team_world(60.0)
    pool = None
    if world.rank == 0:
        own = {"name": LINE, "workers": 3, "retries": 0, "answer_s": 20.0, "construct_s": 30.0, "limit": 7}
        pool = SimulatorPool(SimulatorSettings.model_validate(own | {"wrong": "exit", "at": 5}))
    try:
        player = Player(pool, Steps(), world, RAW, letters, halves=True, on_error="mark")
        episodes, _ = player.play(starts(12), record=Recording(("front", "wrist"), 4))
        return [
            (*one, {name: clip.tolist() for name, clip in e.clip.items()})
            for one, e in zip(told(episodes), episodes, strict=True)
        ]
    finally:
        if pool is not None:
            pool.close()


def test_all_ranks_of_a_replica_see_the_same() -> None:
    from tests.dist import run_distributed

    first, second = run_distributed(_played, 2, 120.0)
    assert repr(first) == repr(second)  # NaN is not equal to itself
    assert any(episode[-2] == "crash" for episode in first)
    assert all(len(e[-1]["wrist"]) == (0 if e[-2] else min(4, sum(e[5]) + 1)) for e in first)
