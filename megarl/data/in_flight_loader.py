"""A loader that draws as many prompts as keep a given number of prompt groups in flight: `rollout.oversample`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megarl.data.batch import Batch
from megarl.data.loader import PromptLoader
from megarl.data.read_ahead import Indexed


class InFlightLoader(PromptLoader):
    """A prompt loader for rounds of generation that have more than `batch_size` prompt groups in flight and end when
    `batch_size` groups are complete. Each batch holds the new prompts of this rank for one round.

    The next prompt goes to the rank with the fewest groups in flight, so that all ranks have about equally many. The
    prompts of a round depend on the loader's state and on `in_flight` and `needed`, which the generating stage sets.

    Attributes:
        in_flight: number of unfinished groups on each rank that the next round continues.
        needed: number of groups that the run has yet to complete; no more than these are in flight. None: unknown.
        numbers: numbers of the prompts in this rank's last batch.
    """

    _knows_next: ClassVar[bool] = False

    def __init__(self, dataset: Indexed, batch_size: int, *place: Any, most: int, **options: Any) -> None:
        """Start at the first epoch.

        Args:
            batch_size: groups that a round has to complete.
            place, options: the other arguments of `PromptLoader`.
            most: groups in flight at the beginning of a round, over all ranks.
        """
        super().__init__(dataset, batch_size, *place, **options)
        self.most = most
        self.in_flight = [0] * self.dp_size
        self.needed: int | None = None
        self.numbers = list[int]()

    def __next__(self) -> Batch:
        most = self.most if self.needed is None else min(self.most, self.needed)
        new = max(0, max(most, self.batch_size) - sum(self.in_flight))
        first, takers = self.number, deal(self.in_flight, new)
        self.numbers = [first + place for place, rank in enumerate(takers) if rank == self.dp_rank]
        pieces = [piece for number in self.numbers for piece in self._pieces_at(number)]
        batch = self._reads.take(("round", first), pieces or [(self._epoch, [])])
        self.go_to(first + len(takers))
        return batch

    @property
    def used(self) -> int:
        """Number of prompts drawn so far, without those whose groups are in flight."""
        return self.number - sum(self.in_flight)

    @property
    def rank_most(self) -> int:
        """Upper limit of the groups in flight on one rank in a round: an equal share of `most`, or more where a rank
        continues more."""
        return max(-(-self.most // self.dp_size), *self.in_flight)


def deal(in_flight: Sequence[int], new: int) -> list[int]:
    """Return the rank that gets each of `new` groups: the rank with the fewest groups in flight, the first of several.

    Args:
        in_flight: number of groups that each rank has in flight already.

    >>> deal([0, 0], 4), deal([2, 0, 1], 4)
    ([0, 1, 0, 1], [1, 1, 2, 0])
    """
    counts, ranks = list(in_flight), list[int]()
    for _ in range(new):
        ranks.append(counts.index(min(counts)))
        counts[ranks[-1]] += 1
    return ranks
