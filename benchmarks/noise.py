"""Ratios of seconds, and how far chance may take them: is it slower, or is that noise?

    in turn     ratios now / then of rounds measured one after the other      the median of such pairs
    apart       seconds of two sessions                                       the ratio of their medians

Slower means: the interval of 99% (bootstrap) lies above 1, and the ratio above a limit that is what sessions of one and
the same code have differed by, and at least 3%.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 0.03  # share by which a step may be slower and still count as equal
APART = 0.10  # the same between sessions, as long as too few of one commit are known
_DRAWS, _TAIL = 4000, 0.005
_NORMAL = 1.4826  # standard deviations of a normal distribution in its median deviation
_SESSIONS, _TIMES = 3, 3.0


@dataclass(frozen=True)
class Judged:
    """The comparison of two measurements of seconds.

    Attributes:
        ratio: now over then.
        low: end of its interval of 99%.
        high: the other end.
        limit: ratio above which it would be slower.
    """

    ratio: float
    low: float
    high: float
    limit: float

    @property
    def slower(self) -> bool:
        """A regression."""
        return self.low > 1 and self.ratio > self.limit

    @property
    def faster(self) -> bool:
        """True when it is as clearly faster as a regression would be slower."""
        return self.high < 1 and self.ratio < 1 / self.limit


def in_turn(now: Sequence[float], then: Sequence[float]) -> Judged:
    """Return the rounds that were measured in turn: what else happens on the machine meets both of a pair.

    Args:
        now: seconds of the present code, one per round.
        then: seconds of the other one.
    """
    ratios = [math.log(one / other) for one, other in zip(now, then, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return _judged(statistics.median(ratios), medians, 1 + LEAST)


def apart(now: Sequence[float], then: Sequence[float], sessions: Sequence[Sequence[float]] = ()) -> Judged:
    """Compare two sessions.

    Args:
        now: seconds of rounds of the present one.
        then: seconds of the other one.
        sessions: rounds of earlier sessions of one commit, which tell what differs between sessions of the same code.
    """
    one, other = ([math.log(seconds) for seconds in rounds] for rounds in (now, then))
    draw = random.Random(0)

    def drawn() -> float:
        return statistics.median(draw.choices(one, k=len(one))) - statistics.median(draw.choices(other, k=len(other)))

    middle = statistics.median(one) - statistics.median(other)
    return _judged(middle, sorted(drawn() for _ in range(_DRAWS)), 1 + _between(sessions))


def _judged(middle: float, medians: Sequence[float], limit: float) -> Judged:
    ends = medians[int(_TAIL * _DRAWS)], medians[int((1 - _TAIL) * _DRAWS) - 1]
    return Judged(math.exp(middle), math.exp(ends[0]), math.exp(ends[1]), limit)


def _between(sessions: Sequence[Sequence[float]]) -> float:
    """Share by which sessions of the same code may differ."""
    if len(sessions) < _SESSIONS:
        return APART
    medians = [math.log(statistics.median(rounds)) for rounds in sessions]
    middle = statistics.median(medians)
    spread = _NORMAL * statistics.median(abs(one - middle) for one in medians)
    return max(LEAST, math.expm1(_TIMES * spread))
