"""Decoding steps of a round that ends when enough groups are complete (`rollout.oversample`), by formula G5.

In a steady state every round of T decoding steps begins B groups and completes B. A group whose longest sample has M
tokens is in flight for ceil(M / T) rounds, and by Little's law o B groups are in flight if this number has the mean o:

    E[ceil(M / T)] = 1 + sum_j P(M > j T) = o,    P(M > t) = 1 - (1 - P(length > t))^n

With `carry_steps` k the longest of a round's samples has to end within k + 1 rounds. If unfinished groups are dropped,
a share 1 / o of the groups is complete: P(M > T) = 1 - 1 / o.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.planning.workload import Workload

_ROUNDS = 64  # at most as many rounds of a group are counted
_HALVINGS = 50


@dataclass(frozen=True)
class OversampledRound:
    """One round of generation of a run with `rollout.oversample`."""

    work: Workload  # the groups that the round completes
    oversample: float
    carry_steps: int  # 0: unfinished groups are dropped

    @property
    def begun(self) -> float:
        """Number of samples that begin in a round."""
        return self.work.number * (1.0 if self.carry_steps else self.oversample)

    @property
    def steps(self) -> float:
        """Decoding steps of the round, T, if all of its samples run at the same time."""
        longest = self.work.lengths.longest_of(self.begun)
        if self.oversample == 1:
            return longest
        low, high = 0.0, longest
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._are_too_few(middle):
                low = middle
            else:
                high = middle
        return max(high, longest / (self.carry_steps + 1)) if self.carry_steps else high

    def running(self, step: float, steps: float) -> tuple[float, float]:
        """Return the number of samples that run at decoding step `step` of a round of `steps`, and their mean number of
        response tokens: those that began in this round, and of each earlier round those that are longer."""
        ages = [step + steps * before for before in range(self._most(steps))]
        counts = [self.begun * self.work.lengths.above(age) for age in ages]
        number = sum(counts)
        if not number:
            return 0.0, step
        return number, sum(count * age for count, age in zip(counts, ages, strict=True)) / number

    def continued(self, steps: float) -> tuple[float, float]:
        """Return how many samples of earlier rounds a round of `steps` decoding steps continues, and their mean number
        of response tokens, which are prefilled again."""
        ages = [steps * before for before in range(1, self._most(steps))]
        counts = [self.begun * self.work.lengths.above(age) for age in ages]
        number = sum(counts)
        tokens = sum(count * age for count, age in zip(counts, ages, strict=True))
        return number, tokens / number if number else 0.0

    def _are_too_few(self, steps: float) -> bool:
        """Return whether fewer groups than a round needs are complete after `steps` decoding steps.

        The mean number of rounds at whose end a group is unfinished is then too large.
        """
        if not steps:
            return True
        above = (self.work.lengths.above(steps * times) for times in range(1, 1 + self._most(steps)))
        unfinished = sum(1 - (1 - each) ** self.work.samples for each in above)
        return unfinished > (self.oversample - 1 if self.carry_steps else 1 - 1 / self.oversample)

    def _most(self, steps: float) -> int:
        """Return the largest number of rounds in which a sample runs."""
        if self.oversample == 1 or not steps:
            return 1
        return max(1, min(_ROUNDS, self.carry_steps + 1, math.ceil(self.work.lengths.longest / steps)))
