"""Whose turns an episode's score counts for, and how much (`env.credit`): its segments, and a share for each.

    each: 1        last: 1, or 0 where the last call does not continue        by_agent: 1 / segments of the agent

A share multiplies the advantage of a segment's tokens; turns with share 0 are not trained on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.envs.protocol import EpisodeFailure
from megarl.envs.registry import import_source
from megarl.gateway.messages import systems_of
from megarl.gateway.record import Record
from megarl.system.errors import ConfigError

KINDS = ("each", "last", "by_agent")


@dataclass(frozen=True)
class Segment:
    """A sequence of turns that are trained on. A turn with which several sequences begin is in the first of them.

    Attributes:
        agent: the text of the system messages, by which the agents of an episode are told apart.
        turns: numbers of the turns, counted over the episode.
        tokens: number of tokens that the policy sampled in these turns.
        messages: the whole conversation, in the form of chat templates, replies included; of images only their places.
        is_last: the segment has the episode's last turn that is trained on.
    """

    agent: str
    turns: tuple[int, ...]
    tokens: int
    messages: list[dict[str, Any]]
    is_last: bool


#: (segments of an episode) -> a share for each
Credit = Callable[[Sequence[Segment]], Sequence[float]]


def by_agent(segments: Sequence[Segment]) -> list[float]:
    """Divide the score of each agent equally among its segments, so that all agents of an episode count the same."""
    counts = Counter(segment.agent for segment in segments)
    return [1.0 / counts[segment.agent] for segment in segments]


def find_credit(name: str) -> Credit | None:
    """Return the function that gives the shares; None: each segment has the share 1.

    Raises:
        ConfigError: `name` is neither a kind nor a function.
    """
    if name in ("each", "last"):
        return None
    if name == "by_agent":
        return by_agent
    source, colon, attribute = name.rpartition(":")
    function = getattr(import_source(source, "env.credit"), attribute, None) if colon else None
    if not callable(function):
        raise ConfigError(
            "this is no way to divide the score of an episode",
            where="env.credit",
            found=name,
            allowed=f"{', '.join(KINDS)}, or a function file.py:fn or pkg.mod:fn",
            fix="correct the name, or define the function there",
        )
    return function


def segments_of(record: Record, untrained: Sequence[int]) -> list[Segment]:
    """Return the segments of an episode, in the order of their last turns; `untrained` are numbers of turns."""
    owned, left = set(untrained), list[tuple[int, ...]]()
    for leaf in record.leaves():
        turns = tuple(node.number for node in record.path(leaf) if node.number not in owned)
        owned.update(turns)
        if turns:
            left.append(turns)
    last = max((turn for turns in left for turn in turns), default=None)
    return [
        Segment(
            "\n".join(systems_of(messages := record.said(record.nodes[turns[-1]]))),
            turns,
            sum(len(record.nodes[turn].token_ids) for turn in turns),
            [message.without_pixels() for message in messages],
            last in turns,
        )
        for turns in sorted(left, key=lambda turns: turns[-1])
    ]


def shares_of(credit: Credit | None, record: Record, untrained: Sequence[int]) -> dict[int, float]:
    """Return the share of every turn that is trained on, by number; empty: all have the share 1.

    Raises:
        EpisodeFailure: the function did not return a finite number for each segment.
    """
    if credit is None:
        return {}
    segments = segments_of(record, untrained)
    shares = list(credit(segments)) if segments else []
    numbers = [share for share in shares if isinstance(share, int | float) and not isinstance(share, bool)]
    if not len(segments) == len(shares) == len(numbers) or not all(map(math.isfinite, numbers)):
        raise EpisodeFailure(
            f"the function of env.credit returned {shares!r:.200}; allowed: a finite number for each of "
            f"{len(segments)} segments"
        )
    return {turn: float(share) for segment, share in zip(segments, shares, strict=True) for turn in segment.turns}
