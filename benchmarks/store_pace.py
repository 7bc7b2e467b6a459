"""Calls of a replica that generates for a minute, as `megarl.disaggregated.pace` makes them: `calls_of_minute`."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Sequence
from itertools import islice

from megarl.disaggregated.buffer.core import GroupInfo
from megarl.disaggregated.buffer.flow import Finished
from megarl.disaggregated.pace import Pace

MINUTE_S, TICK_S, SPREAD = 60.0, 0.02, 0.5
#: Of a group, as the rollout's team tells them.
METRICS = json.dumps({f"response/{name}": ["mean", 4096.0, 8.0] for name in ("length", "clipped", "turns", "score")})
#: How many groups a call hands over, and how many prompts it asks for.
Calls = list[tuple[int, int]]


def prompts_at_first(places: int, limit: int) -> int:
    """Return the prompts that a replica asks for in its first call; see `Pace`."""
    return places + Pace(places, limit).in_hand


def calls_of_minute(groups: int, places: int, limit: int, seed: int) -> Calls:
    """Return the calls between two weight update points, those before the second one included; the minute before was
    like this one.

    Args:
        groups: that get finished; their times are log-normal.
        places: groups that are sampled at a time.
        limit: limit of groups that the replica may hold.
        seed: seed of the times.
    """
    if not groups:
        return []
    draw, pace, calls = random.Random(seed), Pace(places, limit), Calls()
    mean_s = MINUTE_S * places / groups
    pace.begin(-MINUTE_S)
    pace.begin(0.0)
    ends = [draw.uniform(0, mean_s) for _ in range(places)]
    heapq.heapify(ends)
    now, done, over, in_hand = 0.0, 0, 0, pace.in_hand
    while done < groups:
        now += TICK_S
        while ends and ends[0] <= now and done < groups:
            heapq.heappop(ends)
            done, over = done + 1, over + 1
        for _ in range(2):
            while in_hand and len(ends) < places:
                in_hand -= 1
                heapq.heappush(ends, now + mean_s * draw.lognormvariate(-SPREAD * SPREAD / 2, SPREAD))
            room = places - len(ends)
            missing = pace.missing(room, in_hand)
            if done < groups and pace.is_due(now, missing, finished=over > 0, empty=min(room, missing) > 0):
                calls.append((over, missing))
                over, in_hand = 0, in_hand + missing
                pace.called()
    room = places - len(ends)
    at_first = max(0, room - in_hand)  # after the gate; those to have in hand come with the next call
    asked = [(0, most) for most in (at_first, pace.in_hand + room - in_hand - at_first) if most]
    return [*calls, (over, 0), *asked]


def make(
    calls: Calls, drawn: list[int], groups: Sequence[GroupInfo], swap: Callable[[list[Finished], int], list[int]]
) -> None:
    """Make calls.

    Args:
        calls: to make.
        drawn: numbers of the prompts that the replica has; changed.
        groups: that get finished.
        swap: one call: groups, and how many prompts it asks for; returns their numbers.
    """
    left = iter(groups)
    for over, most in calls:
        finished = [Finished(drawn.pop(0), group, METRICS) for group in islice(left, over)]
        drawn += swap(finished, most)
