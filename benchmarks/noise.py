"""Ratios of measured seconds, and whether they exceed noise.

    in_turn     rounds of two programs measured alternately      the median of the ratios of pairs
    apart       rounds of two sessions                           the ratio of the medians

A program is slower if the 99% interval of its ratio (bootstrap) lies above 1, and the ratio above a limit: 3%, or more
if sessions of the same code have differed by more.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 0.03  # a step that is slower by at most this share counts as equal
# the same share if the two steps were measured in different sessions, until enough sessions of one commit are known
APART = 0.10
_DRAWS, _TAIL = 4000, 0.005
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
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

    def texts(self) -> tuple[str, str, str]:
        """Return ratio, interval and limit as text."""
        return f"{self.ratio:.3f}", f"{self.low:.3f} to {self.high:.3f}", f"{self.limit:.3f}"

    @property
    def slower(self) -> bool:
        """Whether it is slower beyond noise: a regression."""
        return self.low > 1 and self.ratio > self.limit

    @property
    def faster(self) -> bool:
        """Whether it is faster beyond noise, by the same limits as `slower`."""
        return self.high < 1 and self.ratio < 1 / self.limit


def in_turn(now: Sequence[float], then: Sequence[float]) -> Judged:
    """Compare rounds that were measured alternately, pair by pair: other load on the machine affects both of a pair.

    Args:
        now: seconds of the present code, one per round.
        then: seconds of the other code.
    """
    ratios = [math.log(new / old) for new, old in zip(now, then, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return _judged(statistics.median(ratios), medians, 1 + LEAST)


def apart(now: Sequence[float], then: Sequence[float], sessions: Sequence[Sequence[float]] = ()) -> Judged:
    """Compare two sessions.

    Args:
        now: seconds of the rounds of this session.
        then: seconds of the rounds of the other session.
        sessions: rounds of earlier sessions of one commit, which show how far sessions of the same code differ.
    """
    new, old = ([math.log(seconds) for seconds in rounds] for rounds in (now, then))
    draw = random.Random(0)

    def drawn() -> float:
        return statistics.median(draw.choices(new, k=len(new))) - statistics.median(draw.choices(old, k=len(old)))

    middle = statistics.median(new) - statistics.median(old)
    return _judged(middle, sorted(drawn() for _ in range(_DRAWS)), 1 + _between(sessions))


def _judged(middle: float, medians: Sequence[float], limit: float) -> Judged:
    ends = medians[int(_TAIL * _DRAWS)], medians[int((1 - _TAIL) * _DRAWS) - 1]
    return Judged(math.exp(middle), math.exp(ends[0]), math.exp(ends[1]), limit)


def _between(sessions: Sequence[Sequence[float]]) -> float:
    """Return the share by which sessions of the same code may differ."""
    if len(sessions) < _SESSIONS:
        return APART
    medians = [math.log(statistics.median(rounds)) for rounds in sessions]
    middle = statistics.median(medians)
    spread = _NORMAL * statistics.median(abs(median - middle) for median in medians)
    return max(LEAST, math.expm1(_TIMES * spread))
