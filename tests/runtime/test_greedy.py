"""ReMax with an environment: one greedy episode per prompt, against the formula in float64."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.run import RunConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.trajectory import Trajectory, trajectory_values
from megarl.runtime.stages import advantage, reward, rollout
from megarl.runtime.stages.update import trained_mask
from megarl.system.metrics import Metrics
from tests.algorithms import oracle
from tests.trajectories import add_turn

#: Rewards that float32 adds without rounding.
eighths = st.integers(-16, 16).map(lambda number: number / 8)


@dataclass
class Episode:
    """What one gave: the reward of each turn; or it failed after these."""

    rewards: list[float]
    failed: bool


episodes = st.builds(Episode, st.lists(eighths, min_size=1, max_size=3), st.booleans())
prompts = st.lists(st.tuples(st.lists(episodes, min_size=1, max_size=4), episodes), min_size=1, max_size=5)


def trajectory(episode: Episode) -> Trajectory:
    """Turns of two tokens, an answer of one between them, after an observation of the environment's own."""
    made = Trajectory([7, 7])
    for turn, value in enumerate(episode.rewards):
        if turn:
            made.add_observation([9])
        add_turn(made, [3, 4], [-0.5, -0.5], [[0, 2]], value)
    made.ended_by = "done"
    if episode.failed:
        made.mark_failed("no state", 2, 0)
    return made


def batch_of(names: list[str], played: list[Episode]) -> Batch:
    """Episodes of these prompts, with the fields that generation gives them."""
    batch = Batch({}, {"uid": names}, size=len(names))
    for name in ("answer", "data_source", "row"):
        batch.set(name, [f"{name} of {uid}" for uid in names])
    batch.set("data_prompt_text", [f"prompt {uid}" for uid in names])
    batch.set("data_prompt_ids", Jagged.from_list([[10, int(uid)] for uid in names], dtype=torch.int64))
    return batch.with_values(trajectory_values([trajectory(episode) for episode in played]))


def context(estimator: str = "remax") -> SimpleNamespace:
    config = RunConfig.model_validate(
        {
            "name": "r",
            "env": {"name": "game.py:Game", "on_error": "mark"},
            "rollout": {"sampling": {"n": 2, "max_new_tokens": 4}, "limits": {"tokens": 10}},
            "algorithm": {"advantage": {"name": estimator}},
        }
    )
    return SimpleNamespace(config=config, metrics=Metrics(), all_sum=lambda values: values)


@settings(max_examples=30, deadline=None)
@given(prompts, st.randoms(use_true_random=False))
def test_samples_are_compared_with_the_whole_greedy_episode_and_left_out_without_one(cases, shuffle):
    """The samples of a prompt stand anywhere in the batch."""
    played = [(str(number), episode) for number, (group, _) in enumerate(cases) for episode in group]
    shuffle.shuffle(played)
    names, own = [uid for uid, _ in played], [episode for _, episode in played]
    samples, greedy, c = batch_of(names, own), [best for _, best in cases], context()

    def generate(c, rollout, prompts, sampling):
        assert (sampling.n, sampling.temperature) == (1, 0.0)
        assert prompts["prompt_text"] == [f"prompt {uid}" for uid in prompts["uid"]], "not the first observation"
        assert [ids.tolist() for ids in prompts["prompt_ids"].unbind()] == [[10, int(uid)] for uid in prompts["uid"]]
        return prompts.with_values(trajectory_values([trajectory(greedy[int(uid)]) for uid in prompts["uid"]]))

    scorer = SimpleNamespace(by_environment=True, runner=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "generate", generate)
        patch.setattr(rollout, "_record_work", lambda c, samples: None)
        samples = rollout.greedy_rollout(c, samples, rollout=None, scorer=scorer)
    samples.set("score", torch.zeros(len(samples)))
    reward.set_scores(samples, reward.collect(c, scorer, [None] * len(samples), samples), by_turn=True)
    found = advantage.advantage(c, samples)

    live = [not episode.failed and not greedy[int(uid)].failed for uid, episode in played]
    drawn = [[on and place % 3 < 2 for place in range(len(e.rewards) * 3 - 1)] for on, e in zip(live, own, strict=True)]
    rewards = [[x for r in e.rewards for x in (0.0, r, 0.0)][:-1] for e in own]
    expected = oracle.remax(rewards, drawn, [sum(greedy[int(uid)].rewards) for uid in names])
    assert [row.tolist() for row in found["advantages"].unbind()] == expected
    assert [row.tolist() for row in trained_mask(found).unbind()] == drawn
    numbers, good = c.metrics.result(), [sum(best.rewards) for best in greedy if not best.failed]
    assert numbers["env/greedy_errors"] == len(greedy) - len(good)
    assert numbers.get("critic/greedy_score/mean") == (sum(good) / len(good) if good else None)


def test_a_replica_without_samples_plays_nothing(monkeypatch: pytest.MonkeyPatch):
    def generate(c, rollout, prompts, sampling):
        return prompts.with_values(trajectory_values([]))

    monkeypatch.setattr(rollout, "generate", generate)
    monkeypatch.setattr(rollout, "_record_work", lambda c, samples: None)
    scorer, c = SimpleNamespace(by_environment=True, runner=None), context()
    samples = rollout.greedy_rollout(c, batch_of([], []), rollout=None, scorer=scorer)
    assert samples["greedy_score"].shape == (0,)
    assert c.metrics.result() == {"env/greedy_errors": 0}


def test_the_prompt_of_the_data_is_kept_for_greedy_episodes_only():
    assert set(rollout.DATA_PROMPT) <= set(rollout.generated_fields(context().config))
    assert not set(rollout.DATA_PROMPT) & set(rollout.generated_fields(context("rloo").config))
