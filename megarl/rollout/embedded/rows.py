"""The assignment of sequences to cache rows while sequences come back for further turns. Without tensors.

    row   0 ... running-1 | running ... used-1 | used ... slots-1
          decoded         | kept: their turn   | free
                          | is over            |

A kept row holds the keys and values of a sequence whose turn is over, so that the next turn begins where it ended. When
no row is free, kept ones are given up; their sequences are read again from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class RowAssignment:
    """The moves for admitted sequences: (source, target) rows to copy all at once, and who is in which row now.

    Attributes:
        kept: (sequence, row) of those whose row was kept.
        fresh: (sequence, row) of those that are read from the start.
    """

    moves: list[tuple[int, int]] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[tuple[int, int]] = field(default_factory=list)


class CacheRows:
    """The rows of one cache; `holders[row]` is the sequence in it."""

    def __init__(self, slots: int) -> None:
        self.slots, self.running = slots, 0
        self.holders: list[int] = []
        self._origin: list[int | None] = []

    def retire(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """End the turns in these running rows, which become kept ones. Returns the moves."""
        self._begin()
        gone, left = set(rows), self.running - len(rows)
        movers = [row for row in range(left, self.running) if row not in gone]
        for hole, mover in zip(sorted(row for row in gone if row < left), movers, strict=True):
            self._swap(hole, mover)
        self.running = left
        return self._moves()

    def forget(self, sequence: int) -> None:
        """Give up the kept row of a sequence that does not come back."""
        row = self.holders.index(sequence, self.running)
        self.holders[row] = -1

    def admit(self, sequences: Sequence[int]) -> RowAssignment:
        """Let the first of `sequences` run, as many as there are slots for."""
        self._begin()
        admission = RowAssignment()
        chosen = list(sequences[: self.slots - self.running])
        for sequence in chosen:
            target = self.running
            if sequence in self.holders[target:]:
                self._swap(target, self.holders.index(sequence, target))
                admission.kept.append((sequence, target))
            else:
                self._clear(target, set(chosen))
                self.holders[target], self._origin[target] = sequence, None
                admission.fresh.append((sequence, target))
            self.running += 1
        admission.moves = self._moves()
        return admission

    def _clear(self, target: int, wanted: set[int]) -> None:
        """Put a row at `target` that a forgotten sequence had, that is unused, or whose sequence is not wanted now."""
        kept = range(target, len(self.holders))
        row = next((row for row in kept if self.holders[row] == -1), None)
        if row is None and len(self.holders) < self.slots:
            row = len(self.holders)
            self.holders.append(-1)
            self._origin.append(None)
        if row is None:
            row = next((row for row in reversed(kept) if self.holders[row] not in wanted), target)
        self._swap(target, row)

    def _begin(self) -> None:
        self._origin = list(range(len(self.holders)))

    def _swap(self, a: int, b: int) -> None:
        self.holders[a], self.holders[b] = self.holders[b], self.holders[a]
        self._origin[a], self._origin[b] = self._origin[b], self._origin[a]

    def _moves(self) -> list[tuple[int, int]]:
        """Return the rows that changed place, without those that nobody needs any more."""
        return [
            (origin, row)
            for row, origin in enumerate(self._origin)
            if origin is not None and origin != row and self.holders[row] != -1
        ]
