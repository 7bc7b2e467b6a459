"""Rows of episodes that several policies play.

    episode a#0    proposer: reward 0.3                a#0@proposer    lanes 0 ...
                   solver: rewards [1, 0] of two       a#0@solver:0    lanes 0 ...
                                                       a#0@solver:1    lanes 0 ...

A *part* is what one reward counts for: all sequences of a policy in an episode or, where the agent gives a list, the
sequences that begin with the same turn. Estimators and metrics take a part for an episode (`megarl.data.lanes`), of its
policy. The tokens of other policies in its sequences are context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.data.lanes import EPISODE, rows_of

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.data.trajectory import Trajectory

POLICY = "policy"


@dataclass(frozen=True)
class PolicyPart:
    """The rows that one policy generated in a part of an episode (see `parts_of`).

    The part's reward stands in the last turn of its first row.
    """

    name: str
    policy: str
    rows: list[Trajectory]


def parts_of(episode: Trajectory, name: str, policies: Sequence[str]) -> Iterator[PolicyPart]:
    """Yield the parts of a finished episode, in the order of `policies`.

    A part has all sequences of one policy or, if the agent gave a list of rewards, those that begin with the same turn.

    Args:
        name: name of the episode.
        policies: names of all policies; empty: the run has one policy, and the whole episode is its only part. An
            episode without a turn is a part of the first policy.
    """
    if not policies:
        yield PolicyPart(name, "", rows_of(episode))
        return
    whole = replace(episode, policy=episode.policy or policies[0])
    lanes = [whole, *episode.lanes]
    for policy in policies:
        of_policy = sorted((lane for lane in lanes if lane.policy == policy), key=lambda lane: lane.turn_numbers[:1])
        # 0 if the episode has no reward for the policy. An empty list means that the agent has not called the policy.
        rewards = episode.rewards.get(policy) or 0.0
        if not of_policy:
            continue
        if not isinstance(rewards, list):
            yield PolicyPart(f"{name}@{policy}", policy, _rows(episode, of_policy, rewards))
            continue
        first_turns = list(dict.fromkeys(lane.turn_numbers[0] for lane in of_policy))
        for number, (first, reward) in enumerate(zip(first_turns, rewards, strict=True)):
            together = [lane for lane in of_policy if lane.turn_numbers[0] == first]
            yield PolicyPart(f"{name}@{policy}:{number}", policy, _rows(episode, together, reward))


def _rows(episode: Trajectory, lanes: Sequence[Trajectory], reward: float) -> list[Trajectory]:
    """Return the sample rows of `lanes`, one policy's sequences in an episode; the first row has their reward."""
    last, others = lanes[-1], list(lanes[:-1])
    part = replace(last, lanes=others, answer=None, info=episode.info, ended_by=episode.ended_by)
    part = replace(part, error=episode.error, output=episode.output)
    rows = rows_of(part)
    rows[0].turn_rewards = [*[0.0] * (rows[0].turns - 1), reward]
    return rows


def whole_episode(part: str) -> str:
    """Return the name of the episode of a part.

    >>> whole_episode("0:17#3@solver:1")
    '0:17#3'
    """
    return part.rpartition("@")[0]


def compared(samples: Batch, compare: str) -> list[str]:
    """Return the group of each row: its prompt, or with `compare` "episode" its episode."""
    return samples["uid"] if compare == "prompt" else [whole_episode(name) for name in samples[EPISODE]]


def places_of(samples: Batch) -> dict[str, list[int]]:
    """Return the places of the rows of each policy in the batch."""
    places: dict[str, list[int]] = {}
    for place, policy in enumerate(samples[POLICY]):
        places.setdefault(policy, []).append(place)
    return places
