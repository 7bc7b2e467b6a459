"""The assignment of sequences to cache rows across turns, without tensors.

    row   0 ... running-1 | running ... used-1 | used ... slots-1
          decoding        | kept               | free

A kept row holds the keys and values of a sequence between two turns, so that the next turn prefills only new tokens.
When no row is free, kept rows are evicted; their sequences are prefilled from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class RowAssignment:
    """The cache rows assigned to newly admitted sequences.

    Attributes:
        moves: (source, target) rows to copy, all at once.
        reused: (sequence, row) of sequences whose row was kept.
        fresh: (sequence, row) of sequences that are prefilled from the start.
    """

    moves: list[tuple[int, int]] = field(default_factory=list)
    reused: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[tuple[int, int]] = field(default_factory=list)


class CacheRows:
    """The rows of one key/value cache; `holders[row]` is the sequence in the row, or -1.

    The first `running` rows are being decoded; later rows are kept for the next turns of their sequences.
    """

    def __init__(self, slots: int) -> None:
        self.slots, self.running = slots, 0
        self.holders: list[int] = []
        self._origin: list[int | None] = []

    def retire(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Stop decoding these rows but keep their cache; return the (source, target) rows to copy."""
        self._begin()
        gone, left = set(rows), self.running - len(rows)
        movers = [row for row in range(left, self.running) if row not in gone]
        for hole, mover in zip(sorted(row for row in gone if row < left), movers, strict=True):
            self._swap(hole, mover)
        self.running = left
        return self._moves()

    def forget(self, sequence: int) -> None:
        """Free the kept row of a sequence that has no further turn."""
        row = self.holders.index(sequence, self.running)
        self.holders[row] = -1

    def admit(self, sequences: Sequence[int]) -> RowAssignment:
        """Assign rows to `sequences`, in order, until all rows decode; evict kept rows of others if needed."""
        self._begin()
        admission = RowAssignment()
        chosen = list(sequences[: self.slots - self.running])
        for sequence in chosen:
            target = self.running
            if sequence in self.holders[target:]:
                self._swap(target, self.holders.index(sequence, target))
                admission.reused.append((sequence, target))
            else:
                self._clear(target, set(chosen))
                self.holders[target], self._origin[target] = sequence, None
                admission.fresh.append((sequence, target))
            self.running += 1
        admission.moves = self._moves()
        return admission

    def _clear(self, target: int, wanted: set[int]) -> None:
        """Swap a free row into position `target`; if there is none, a row whose sequence is not in `wanted`."""
        rows = range(target, len(self.holders))
        row = next((row for row in rows if self.holders[row] == -1), None)
        if row is None and len(self.holders) < self.slots:
            row = len(self.holders)
            self.holders.append(-1)
            self._origin.append(None)
        if row is None:
            row = next((row for row in reversed(rows) if self.holders[row] not in wanted), target)
        self._swap(target, row)

    def _begin(self) -> None:
        self._origin = list(range(len(self.holders)))

    def _swap(self, a: int, b: int) -> None:
        self.holders[a], self.holders[b] = self.holders[b], self.holders[a]
        self._origin[a], self._origin[b] = self._origin[b], self._origin[a]

    def _moves(self) -> list[tuple[int, int]]:
        """Return the (old, new) row of each sequence that has to be copied to another cache row."""
        return [
            (origin, row)
            for row, origin in enumerate(self._origin)
            if origin is not None and origin != row and self.holders[row] != -1
        ]
