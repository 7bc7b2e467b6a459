"""Episodes of several sequences as rows of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.algorithm import AlgorithmConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.lanes import EPISODE, LANE, SHARE, UNSAMPLED, leads, rows_of, spread
from megarl.data.trajectory import Trajectory, token_shares
from megarl.runtime.stages.advantage import advantage, kl_in_reward
from megarl.runtime.stages.shaping import overlong
from megarl.system.errors import MegarlError
from megarl.system.metrics import Metrics


def add_turn(lane: Trajectory, tokens: list[int]) -> Trajectory:
    lane.add_segment(tokens, [-0.5] * len(tokens), [[3, len(tokens)]])
    lane.end_turn("stop")
    lane.turn_rewards.append(0.0)
    return lane


def episode() -> Trajectory:
    """Turns 0 and 1 in a line, turn 2 beside 1, turn 3 of a sub-agent, turn 4 after 1; it scores 0.5."""
    line = add_turn(Trajectory([1, 2]), [10])
    line.add_observation([5])
    line = add_turn(line, [11, 11])
    line = add_turn(line.switched(0, [5], 8), [12])
    line = add_turn(line.switched(None, [7, 7, 7], 2), [13])
    line = add_turn(line.switched(1, [6], 8), [14])
    line.turn_rewards[-1] = 0.5
    line.end("done")
    return line


def test_every_turn_is_trained_on_in_one_row_and_the_first_row_has_the_reward():
    rows = rows_of(episode())
    assert [[*row.prompt_ids, *row.token_ids] for row in rows] == [
        [1, 2, 10, 5, 11, 11, 6, 14],
        [1, 2, 10, 5, 12],
        [7, 7, 7, 13],
    ]
    trained = [[t for t, sampled in zip(row.token_ids, row.sampled, strict=True) if sampled] for row in rows]
    assert trained == [[10, 11, 11, 14], [12], [13]]
    assert [row.turn_rewards for row in rows] == [[0.0, 0.0, 0.5], [0.0, 0.0], [0.0]]
    assert rows[2].prompt_ids == [7, 7]  # the rest of a long prompt counts as an observation
    assert [sum(length for _, length in row.versions) for row in rows] == [len(row.token_ids) for row in rows]


def test_turns_that_nobody_received_are_not_trained_on_and_leave_no_rows():
    played = episode()
    played.leave_out([2, 3])
    assert [row.turn_numbers for row in rows_of(played)] == [[0, 1, 4]]
    played.leave_out([0, 1, 4])
    [row] = rows_of(played)
    assert (any(row.sampled), sum(row.turn_rewards)) == (False, 0.5)


def test_the_reward_is_on_the_last_trained_turn_so_that_an_unread_last_turn_changes_no_baseline():
    whole, cut = (add_turn(Trajectory([1, 2]), [10]) for _ in range(2))
    cut.add_observation([5])
    add_turn(cut, [11, 11]).leave_out([1])
    for episode_ in (whole, cut):
        episode_.turn_rewards[-1] = 1.0
        episode_.end("done")
    rows = [row for episode_ in (whole, cut) for row in rows_of(episode_)]
    assert [(row.token_ids, row.turn_rewards) for row in rows] == [([10], [1.0])] * 2
    samples = batch([sum(row.turn_rewards) for row in rows], [[0], [0]], [row.sampled for row in rows])
    result = advantage(context(advantage={"name": "grpo"}), samples)["advantages"]
    assert [row.tolist() for row in result.unbind()] == [[0.0], [0.0]]


def test_the_first_row_is_the_sequence_of_the_answer():
    played = episode()
    played.answer = 2
    assert rows_of(played)[0].turn_numbers == [0, 2]
    assert [sum(row.turn_rewards) for row in rows_of(played)] == [0.5, 0.0, 0.0]
    trained = sorted(
        turn
        for row in rows_of(played)
        for turn in row.turn_numbers
        if row.sampled[row.turn_starts[row.turn_numbers.index(turn)]]
    )
    assert trained == [0, 1, 2, 3, 4]


def test_a_sequence_of_several_lanes_survives_json():
    played = episode()
    again = Trajectory.from_json(played.to_json(), {})
    assert again == played
    assert [lane.turn_numbers for lane in again.all_lanes] == [lane.turn_numbers for lane in played.all_lanes]


def batch(scores: list[float], lanes: list[list[int]], mask: list[list[int]]) -> Batch:
    """A group whose episode k has the rows `lanes[k]`."""
    names = [f"a#{k}" for k, rows in enumerate(lanes) for _ in rows]
    masks = Jagged.from_list(mask, dtype=torch.bool)
    rewards = torch.zeros(len(masks.values))
    samples = Batch({"response_mask": masks}, {"uid": ["a"] * len(names), EPISODE: names}, size=len(names))
    samples.set(LANE, torch.tensor([row for rows in lanes for row in rows]))
    for place, score in zip(leads(samples), scores, strict=True):
        rewards[int(masks.offsets[place + 1]) - 1] = score
    samples.set("token_rewards", masks.like(rewards))
    return samples


def context(**algorithm: Any) -> Any:
    config = SimpleNamespace(algorithm=AlgorithmConfig(**algorithm))
    return SimpleNamespace(config=config, metrics=Metrics(), all_sum=lambda values: values)


def test_baselines_compare_episodes_and_not_their_rows():
    samples = batch([1.0, 0.0], [[0, 1, 2], [0]], [[1, 0, 1], [0, 1], [1], [1, 1]])
    settings = {"advantage": {"name": "grpo", "norm_by_std": False}}
    result = advantage(context(**settings), samples)["advantages"]
    assert [row.tolist() for row in result.unbind()] == [[0.5] * 3, [0.5] * 2, [0.5], [-0.5] * 2]
    assert spread(["x", "y"], samples) == ["x", "x", "x", "y"]
    with pytest.raises(MegarlError, match=r"algorithm.loss.aggregation"):
        advantage(context(**settings, loss={"aggregation": "seq-mean-token-mean"}), samples)


def test_the_score_of_an_episode_without_a_trained_turn_counts_in_the_mean_of_its_group():
    settings = {"advantage": {"name": "grpo", "norm_by_std": False}}
    samples = batch([1.0, 0.25], [[0], [0]], [[1, 0, 1], [0]])
    samples.set(UNSAMPLED, torch.tensor([False, True]))
    result = advantage(context(**settings), samples)["advantages"]
    assert [row.tolist() for row in result.unbind()] == [[0.375, 0.0, 0.375], [0.0]]


def test_the_share_of_a_turn_multiplies_its_advantage():
    settings = {"advantage": {"name": "grpo", "norm_by_std": False}}
    samples = batch([1.0, 0.0], [[0, 1], [0]], [[1, 0, 1], [0, 1], [1]])
    samples.set(SHARE, samples["response_mask"].like(torch.tensor([1.0, 1.0, 0.5, 1.0, 2.0, 1.0])))
    result = advantage(context(**settings), samples)["advantages"].values
    assert result[samples["response_mask"].values].tolist() == [0.5, 0.25, 1.0, -0.5]
    played = episode()
    played.set_shares({1: 0.5, 3: 2.0})
    rows = rows_of(played)
    shares = token_shares(rows, Jagged.from_list([row.token_ids for row in rows], dtype=torch.int64))
    assert [row.tolist() for row in shares.unbind()] == [
        [1.0, 1.0, 0.5, 0.5, 1.0, 1.0],
        [1.0, 1.0, 1.0],
        [1.0, 2.0],
    ]


def test_one_episode_in_one_row_or_many_gives_its_tokens_the_same_weights():
    """The gradient's weight of each sampled token: advantage times mask."""
    settings = {"advantage": {"name": "grpo"}}
    whole = batch([1.0, 0.0, 0.0], [[0], [0], [0]], [[1, 1, 1, 1], [1], [1]])
    split = batch([1.0, 0.0, 0.0], [[0, 1, 2], [0], [0]], [[1, 0, 1], [0, 0, 1], [0, 1], [1], [1]])
    weights = []
    for samples in (whole, split):
        result = advantage(context(**settings), samples)["advantages"]
        weights.append(result.values[samples["response_mask"].values].tolist())
    assert weights[0] == weights[1]


def test_what_reads_the_rows_of_one_sample_is_refused_for_episodes_of_several_rows():
    samples = batch([1.0, 0.0], [[0, 1], [0]], [[1, 0, 1], [0, 1], [1, 1]])
    with pytest.raises(MegarlError, match=r"the estimator gae[\s\S]*algorithm.advantage.name"):
        advantage(context(advantage={"name": "gae"}), samples)
    with pytest.raises(MegarlError, match=r"algorithm.kl.use"):
        kl_in_reward(context(), samples)
    with pytest.raises(MegarlError, match=r"algorithm.overlong.buffer_tokens"):
        overlong(context(overlong={"buffer_tokens": 4}), samples)
