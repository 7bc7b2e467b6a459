"""Samples of several turns in a batch: whose tokens they are, and which weights sampled them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.correction import staleness
from megarl.data.batch import Batch, Jagged
from megarl.data.kept_tokens import KeptTokens
from megarl.data.trajectory import Trajectory, policy_tokens, trajectory_values
from megarl.data.versions import runs_of, token_versions, tokens_by_version, version_values
from megarl.system.errors import MegarlError
from tests.trajectories import add_turn

EOS = 2
#: An episode: for each turn the version of each token that the policy sampled, and how much the environment said to it.
episodes = st.lists(
    st.lists(st.tuples(st.lists(st.integers(3, 6), min_size=1, max_size=5), st.integers(0, 4)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


def played(turns: list[tuple[list[int], int]]) -> Trajectory:
    trajectory = Trajectory([1])
    for versions, said in turns:
        add_turn(trajectory, [5] * len(versions), [-1.0] * len(versions), runs_of(versions))
        trajectory.add_observation([7] * said)
    return trajectory


def batch_of(trajectories: list[Trajectory]) -> Batch:
    return Batch(size=len(trajectories)).with_values(trajectory_values(trajectories))


@given(episodes, st.integers(6, 9))
def test_every_token_has_its_version_and_ages_are_of_what_the_policy_drew(games, now):
    batch = batch_of([played(turns) for turns in games])
    versions = [[v for drawn, said in turns for v in [*drawn, *[drawn[-1]] * said]] for turns in games]
    assert [row.tolist() for row in token_versions(batch).unbind()] == versions
    drawn = [v for turns in games for versions, _ in turns for v in versions]
    numbers = staleness(*tokens_by_version(batch, batch["response_mask"].values), now, 3).result()
    ages = [now - v for v in drawn]
    assert numbers["rollout_corr/staleness_max"] == max(ages)
    assert numbers["rollout_corr/staleness_mean"] == sum(ages) / len(ages)
    assert numbers["rollout_corr/staleness/1"] == ages.count(1) / len(ages)
    assert policy_tokens(batch, by_turn=True).tolist() == [
        sum(len(versions) for versions, _ in turns) for turns in games
    ]


def test_the_mask_of_observations_follows_the_episode():
    """Of an observation of three tokens the second is its own; a failed and a cut episode lose those that they drop."""
    episodes = [Trajectory([1]) for _ in range(3)]
    for episode in episodes:
        for _ in range(2):
            add_turn(episode, [5, 5], [-1.0, -1.0], runs_of([3, 3]))
            episode.add_observation([7, 8, 7], None, [[1, 2]])
    _, cut, failed = episodes
    cut.end_before_turn(EOS, 3)
    failed.mark_failed("no state", EOS, 3)
    values = trajectory_values([Trajectory.from_json(e.to_json(), {}) for e in episodes], bodies=True)
    rows = [row.int().tolist() for row in values["observation_mask"].unbind()]
    assert rows == [[0, 0, 0, 1, 0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 0], [0] * 10]


def test_an_episode_that_ends_before_a_turn_keeps_no_version_of_tokens_that_it_drops():
    """Tokens that come after a change of the weights are a run of versions of their own."""
    first, later = Trajectory([1]), Trajectory([1])
    add_turn(later, [5, 6], [-1.0, -2.0], [[3, 2]])
    for episode in (first, later):
        episode.add_unsampled([7, 8], 4)
        episode.end_before_turn(EOS, 5)
    assert (first.token_ids, first.versions) == ([EOS], [[5, 1]])
    assert (later.token_ids, later.versions) == ([5, 6], [[3, 2]])


def test_a_failed_episode_is_no_age_and_keeps_what_the_policy_drew():
    late, early, fine = played([([3, 4], 2)]), Trajectory([1]), played([([5], 0)])
    late.mark_failed("no state", EOS, 4)
    early.mark_failed("no state", EOS, 4)
    batch = batch_of([late, early, fine])
    assert [t.last_turn for t in (late, early)] == [[5, 5], []]
    assert policy_tokens(batch, by_turn=True).tolist() == [2, 0, 1]
    numbers = staleness(*tokens_by_version(batch, batch["response_mask"].values), 5, 2).result()
    assert numbers["rollout_corr/staleness_max"] == 0
    assert staleness(*tokens_by_version(batch, torch.zeros(6, dtype=torch.bool)), 5, 2).result() == {}


def test_versions_of_single_turns_do_not_grow_with_the_tokens():
    def size(length: int) -> int:
        responses = Jagged.from_lengths(torch.zeros(4 * length, dtype=torch.int64), [length] * 4)
        plain = Batch({"response_ids": responses})
        before = len(plain.to_bytes())
        plain = plain.with_values(version_values([[[9, length]]] * 4))
        assert token_versions(plain).values.tolist() == [9] * 4 * length
        return len(plain.to_bytes()) - before

    assert size(1000) < 500, "two numbers and an offset per sample, and names, for 4,000 tokens"


def test_a_copy_is_equal_and_shares_no_list():
    one = played([([3, 4], 2), ([5], 1)])
    one.turn_rewards, one.info = [1.0, 0.0], {"tries": 2.0}
    two = one.copy()
    assert two == one
    for name, value in vars(one).items():
        assert value is not getattr(two, name) or not isinstance(value, list | dict), name
    assert not {id(run) for run in one.versions} & {id(run) for run in two.versions}


def test_kept_tokens_follow_their_tokens_through_segments_observations_and_json():
    trajectory = Trajectory([1])
    trajectory.add_segment([5, 6], [-1.0, -1.0], [[0, 2]], kept=KeptTokens.from_lists([[5, 8], [6]]))
    trajectory.add_segment([7], [-1.0], [[1, 1]], kept=KeptTokens.from_lists([[7, 3, 4]]))
    trajectory.end_turn("stop")
    trajectory.add_observation([9, 9])
    trajectory.add_segment([4], [-1.0], [[1, 1]], kept=KeptTokens.from_lists([[4, 2]]))
    trajectory.end_turn("stop")
    trajectory.add_observation([9])
    trajectory.end("done")
    failed = Trajectory([1])
    failed.mark_failed("no answer", EOS, 1)
    restored = [Trajectory.from_json(t.to_json(), {}) for t in (trajectory, failed)]
    batch = Batch(size=2).with_values(trajectory_values(restored, kept=True))
    assert [row.tolist() for row in batch["kept_counts"].unbind()] == [[2, 1, 3, 0, 0, 2, 0], [0]]
    assert [row.tolist() for row in batch["kept_ids"].unbind()] == [[5, 8, 6, 7, 3, 4, 4, 2], []]
    assert Batch.concat([batch.select([1]), batch.select([0])])["kept_ids"].lengths.tolist() == [0, 8]
    trajectory.add_segment([3], [-1.0], [[1, 1]])
    with pytest.raises(MegarlError, match=r"rollout\.replay_kept_tokens"):
        trajectory_values([trajectory], kept=True)
