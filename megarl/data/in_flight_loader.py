"""A loader that draws as many prompts as keep a given number of prompt groups in flight: `rollout.oversample`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megarl.data.batch import Batch
from megarl.data.loader import PromptLoader
from megarl.data.read_ahead import Indexed


class InFlightLoader(PromptLoader):
    """The iterator over the new prompts of each round of generation, of which `batch_size` become complete.

    The next prompt goes to the rank with the fewest groups in flight, so that all ranks have about equally many. The
    prompts of a round depend on the state and on `in_flight` and `needed`, which whoever generates sets.

    Attributes:
        in_flight: number of groups in flight on each rank, which the next round continues.
        needed: number of groups that all remaining rounds train on, beyond which none begins; None: unknown.
        numbers: numbers of the prompts that this rank got last.
    """

    _knows_next: ClassVar[bool] = False

    def __init__(self, dataset: Indexed, batch_size: int, *place: Any, most: int, **options: Any) -> None:
        """Start at the first epoch.

        Args:
            batch_size: groups that a round needs.
            place, options: further arguments of `PromptLoader`.
            most: groups in flight at the beginning of a round.
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
        """Number of prompts drawn so far whose groups are complete."""
        return self.number - sum(self.in_flight)

    @property
    def rank_most(self) -> int:
        """Largest number of groups that a rank has in flight."""
        return max(-(-self.most // self.dp_size), *self.in_flight)


def deal(in_flight: Sequence[int], new: int) -> list[int]:
    """Return the rank of each of `new` groups: that with the fewest groups in flight, on a tie the first.

    >>> deal([0, 0], 4), deal([2, 0, 1], 4)
    ([0, 1, 0, 1], [1, 1, 2, 0])
    """
    counts, ranks = list(in_flight), list[int]()
    for _ in range(new):
        ranks.append(counts.index(min(counts)))
        counts[ranks[-1]] += 1
    return ranks
