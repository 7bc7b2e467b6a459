"""How a batch gets from the ranks that made it to the ranks that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class DataLayout:
    """Which ranks hold which part of a batch.

    Attributes:
        parts: one tuple of global ranks per data-parallel part. All ranks of a part (the tensor-, pipeline- and
            context-parallel ranks of one replica) hold the same samples; the first of them is the lead.

    >>> DataLayout.of(range(4), dp=2)
    DataLayout(parts=((0, 1), (2, 3)))
    """

    parts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for part in self.parts for rank in part]
        if not self.parts or not all(self.parts) or len(set(ranks)) != len(ranks):
            raise ValueError(f"every part needs a rank, and every rank is in one part only: {self.parts}")

    @classmethod
    def of(cls, ranks: Sequence[int], dp: int) -> DataLayout:
        """`ranks` cut into `dp` equal parts of neighbours.

        Raises:
            ValueError: `dp` does not divide the number of ranks.
        """
        ranks = list(ranks)
        if dp < 1 or len(ranks) % dp:
            raise ValueError(f"{len(ranks)} ranks do not split into {dp} equal parts")
        size = len(ranks) // dp
        return cls(tuple(tuple(ranks[i * size : (i + 1) * size]) for i in range(dp)))

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks that hold a part."""
        return frozenset(rank for part in self.parts for rank in part)

    def part_of(self, rank: int) -> int | None:
        """Number of the part `rank` holds, or None."""
        return next((number for number, part in enumerate(self.parts) if rank in part), None)


class Exchange(Protocol):
    """Moves samples between layouts."""

    def prepare(self, edges: Sequence[tuple[DataLayout, DataLayout]]) -> None:
        """Get ready for movements along these (source, destination) layouts.

        Called by every process of the job, with the same edges in the same order, before the first movement.
        """
        ...

    def redistribute(
        self, batch: Any, src: DataLayout, dst: DataLayout, *, key: str, held: Sequence[str] | None = None
    ) -> Any:
        """Every sample with every field, exactly once, from the parts of `src` to the parts of `dst`.

        Called by every rank of either layout with the same `key`, by nobody else.

        Args:
            batch: this rank's part under `src`; None on ranks outside `src`.
            src: where the samples are.
            dst: where they are needed.
            key: names this movement (step and edge); ranks that disagree about it get an error, not mixed data.
            held: `sample_id`s this rank already works on under `dst`, in order. When the held samples of all
                destination parts are exactly the moved ones, each sample goes back to the part that holds it.

        Returns:
            This rank's part under `dst`; None on ranks outside `dst`.
        """
        ...

    def ids(self, batch: Any) -> list[str] | None:
        """`sample_id` of every sample, or None when the batch has no such column."""
        ...
