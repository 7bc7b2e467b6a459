"""Episodes whose time is over while a turn is under way: they keep what was drawn, and that is trained on."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megarl.config.rollout import SamplingConfig
from megarl.data.batch import Batch
from megarl.data.trajectory import Trajectory, trajectory_values
from megarl.envs import Action, Environment, Step
from megarl.envs.host import Host
from megarl.rollout.batched import BatchedGeneration
from tests.dist import single_process
from tests.envs import playing
from tests.envs.playing import group, rules_of
from tests.envs.test_episode_groups import Scripted
from tests.rollout.cases import engine, full_forward
from tests.training import cases
from tests.trajectories import add_turn

END = 130
SAMPLING = SamplingConfig(max_new_tokens=30)


class Talks(Environment):
    """Says the same two tokens after every turn."""

    seen: ClassVar[list[str]] = []

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """The prompt stays as it is."""

    def step(self, action: Action) -> Step:
        self.seen.append(action.finish_reason)
        return Step([7, 8], reward=1.0)


class Sleeps(Talks):
    """Takes its time before it says something."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        time.sleep(0.02)


def play(made: Any, seconds: float | None, prompts: list[list[int]], stops: list[int] | None = None):
    host = Host(Talks, Talks.Settings())
    groups = [
        group(f"{i}", {}, prompt, 0, lambda turn, i=i: 10 * i + turn)  # type: ignore[misc]
        for i, prompt in enumerate(prompts)
    ]
    try:
        return playing.play(made, rules_of(host, turns=2, tokens=70, seconds=seconds), groups, SAMPLING, stops or [END])
    finally:
        host.close()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the groups goes on by a second with every look at it."""
    ticks = itertools.count()
    monkeypatch.setattr("megarl.rollout.groups.time", SimpleNamespace(monotonic=lambda: float(next(ticks))))


@pytest.fixture
def trained() -> tuple[Any, Any]:
    """An engine for training, and generation on its weights, two sequences at a time."""
    torch.set_num_threads(1)
    single_process()
    policy = cases.make_engine()
    return policy, engine(policy.chunks, max_running=2)


def test_the_limit_is_looked_at_between_turns(ticking):
    [over] = play(Scripted("1"), 2.5, [[3]])  # the third look comes after the environment's answer
    assert (over.ended_by, over.finish_reason, over.turns, over.sampled) == ("seconds", "stop", 1, [True] * 2)


def test_turns_that_are_under_way_keep_what_was_drawn(trained, ticking):
    _, made = trained
    prompts = [[3, 4, 5], [6, 7], [8]]
    whole = play(made, None, prompts)
    Talks.seen = []
    cut = play(made, 3.5, prompts)  # the fourth look comes after 24 decode steps
    assert [t.ended_by for t in cut] == ["seconds"] * 3
    assert Talks.seen == ["abort"] * 2  # the environment answers what was said
    for part, full in zip(cut[:2], whole[:2], strict=True):
        assert len(part.token_ids) == 24
        assert part.finish_reason == "abort"
        assert part.token_ids == full.token_ids[:24]
        assert part.logprobs == full.logprobs[:24]
        assert (part.sampled, part.turn_ends, part.turn_rewards) == ([True] * 24, [24], [1.0])
    waited = cut[2]  # for a row: it never said a word
    assert (waited.token_ids, waited.sampled, waited.turn_ends, waited.finish_reason) == ([END], [False], [1], "abort")


#: End tokens that come often enough for second turns.
OFTEN = [END, *range(0, 130, 9)]
PROMPTS = [[3, 4, 5], [6, 7], [8]]


def test_whenever_the_time_is_over_what_is_kept_is_the_beginning_of_the_episode(trained, ticking):
    _, made = trained
    whole, kinds = play(made, None, PROMPTS, OFTEN), set()
    for seconds in range(10):
        for part, full in zip(play(made, seconds + 0.5, PROMPTS, OFTEN), whole, strict=True):
            if part.sampled == [False]:
                kinds.add("nothing")
                assert (part.token_ids, part.ended_by, part.finish_reason) == ([END], "seconds", "abort")
                continue
            count = len(part.token_ids)
            assert (part.token_ids, part.sampled) == (full.token_ids[:count], full.sampled[:count])
            assert part.logprobs == full.logprobs[:count]
            assert part.turn_ends[-1] == count
            assert part.sampled[-1]
            kinds.add((part.ended_by, part.finish_reason, part.turns))
    assert kinds >= {"nothing", ("seconds", "abort", 1), ("seconds", "abort", 2), ("turns", "stop", 2)}


def test_what_is_kept_trains_like_a_brute_force_sum_over_it(trained, ticking):
    """Log-probs and gradient of the engine against plain autograd over each turn that was kept, in float32."""
    policy, made = trained
    plays = (play(made, seconds + 0.5, PROMPTS, OFTEN) for seconds in range(10))
    cut = next(p for p in plays if any(t.finish_reason == "abort" and t.turns == 2 for t in p))
    samples = Batch({}, {"sample_id": ["a", "b", "c"]}).with_values(trajectory_values(cut))
    weights = torch.where(samples["response_mask"].values, 0.01, 0.0)
    samples.set("loss_weights", samples["response_ids"].like(weights))

    chunk = policy.chunks[0]
    parameters = [p for p in chunk.parameters() if p.requires_grad]
    total = torch.zeros(())
    for trajectory in cut:
        for start, end in zip(trajectory.turn_starts, trajectory.turn_ends, strict=True):
            before = trajectory.prompt_ids + trajectory.token_ids[:start]
            logp = full_forward(chunk, before, trajectory.token_ids[start:end], grad=True)
            # Decoding and one pass over the whole sequence round differently: 1e-6 was measured.
            torch.testing.assert_close(torch.tensor(trajectory.logprobs[start:end]), logp.detach(), rtol=0, atol=1e-5)
            total = total - 0.01 * logp.sum()
    expected = torch.autograd.grad(total, parameters)

    found: list[torch.Tensor] = []

    def capture(batch, groups, losses):
        found.extend(p.main_grad.clone() for p in parameters)
        return {"grad_norm": 0.0, "lr": 0.0}

    policy._update = capture
    policy.sft_step(samples).result()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_an_engine_in_rounds_ends_before_a_round_that_would_come_too_late():
    slow = Host(Sleeps, Sleeps.Settings())
    rules = rules_of(slow, turns=2, tokens=70, seconds=0.01)
    try:
        [over] = playing.play(Scripted("1"), rules, [group("0", {}, [3], 0, lambda turn: turn)], SAMPLING, [END])
    finally:
        slow.close()
    assert (over.ended_by, over.token_ids, over.sampled) == ("seconds", [END], [False])


def test_a_round_that_would_come_too_late_is_still_one_for_the_replicas_that_wait_for_it_in_theirs(ticking):
    """Experts are shared: the calls of all replicas must pair off, whoever has how many turns."""
    calls: list[str] = []

    class Together(Scripted):
        def generate(self, requests, sampling, eos_ids, advance=None):
            calls.append(f"generate {len(requests)}")
            return super().generate(requests, sampling, eos_ids, advance)

        def open(self, sampling, eos_ids, sequences, longest):
            return BatchedGeneration(self.generate, lambda busy: calls.append("busy") or busy, sampling, eos_ids)

    assert [t.ended_by for t in play(Together("1"), 3.5, [[3], [4]])] == ["seconds"] * 2
    assert calls == ["busy", "generate 2", "busy", "generate 0", "busy", "generate 0", "busy"]


def test_an_episode_that_said_nothing_in_a_later_turn_drops_what_it_was_told():
    told = Trajectory([1])
    add_turn(told, [5, 6], [-1.0, -2.0], [[3, 2]])
    told.add_observation([7, 8])
    told.end_before_turn(END, 4)
    assert (told.token_ids, told.sampled, told.logprobs, told.versions) == ([5, 6], [True] * 2, [-1.0, -2.0], [[3, 2]])
    assert (told.ended_by, told.finish_reason, told.turns) == ("seconds", "abort", 1)
