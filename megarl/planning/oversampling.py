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

_ROUNDS = 64  # maximum number of rounds that a group is assumed to continue in
_HALVINGS = 50


@dataclass(frozen=True)
class OversampledRound:
    """One round of generation, in a steady state, of a run with `rollout.oversample`."""

    work: Workload  # the prompt groups that the round has to complete
    oversample: float
    carry_steps: int  # how many more steps an unfinished group may continue in; 0: unfinished groups are dropped

    @property
    def begun(self) -> float:
        """Number of samples that begin in each round."""
        return self.work.number * (1.0 if self.carry_steps else self.oversample)

    @property
    def steps(self) -> float:
        """Number of decoding steps of the round, T, if all samples in flight are decoded at the same time."""
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
        """Return how many samples are still decoded at decoding step `step` of a round of `steps` steps, and their mean
        number of response tokens. Samples of earlier rounds that are not finished count, too."""
        ages = [step + steps * before for before in range(self._most(steps))]
        counts = [self.begun * self.work.lengths.above(age) for age in ages]
        number = sum(counts)
        if not number:
            return 0.0, step
        return number, sum(count * age for count, age in zip(counts, ages, strict=True)) / number

    def continued(self, steps: float) -> tuple[float, float]:
        """Return how many unfinished samples of earlier rounds continue in a round of `steps` decoding steps, and the
        mean number of response tokens that they have, which are prefilled again."""
        ages = [steps * before for before in range(1, self._most(steps))]
        counts = [self.begun * self.work.lengths.above(age) for age in ages]
        number = sum(counts)
        tokens = sum(count * age for count, age in zip(counts, ages, strict=True))
        return number, tokens / number if number else 0.0

    def _are_too_few(self, steps: float) -> bool:
        """Return whether a round of `steps` decoding steps completes fewer groups than it has to.

        It does if the mean number of rounds at whose end a group is unfinished is above what `oversample` allows.
        """
        if not steps:
            return True
        above = (self.work.lengths.above(steps * times) for times in range(1, 1 + self._most(steps)))
        unfinished = sum(1 - (1 - each) ** self.work.samples for each in above)
        return unfinished > (self.oversample - 1 if self.carry_steps else 1 - 1 / self.oversample)

    def _most(self, steps: float) -> int:
        """Return the largest number of rounds of `steps` decoding steps over which one sample is decoded."""
        if self.oversample == 1 or not steps:
            return 1
        return max(1, min(_ROUNDS, self.carry_steps + 1, math.ceil(self.work.lengths.longest / steps)))
