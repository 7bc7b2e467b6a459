"""Metrics of many ranks as one row of numbers, which the ranks reduce without sending names.

    first call:   names that some rank has and the table lacks are gathered once, and every rank adds them
    every call:   row of this rank -> combined pairwise up a tree of ranks -> broadcast -> Metrics

The first number of a row counts names that a rank has and the table lacks. Then there are three numbers for each name
of the table: its sum (for a minimum or maximum: how many ranks have a value that is not NaN), its count, and how many
ranks have the metric. The row ends with the largest value for each name (for a minimum: of the negated values).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megarl.system.metrics import Metrics, Reduction

_PER_NAME = 3  # how many numbers of each name are summed over ranks: sum, count, ranks
_EXTREMES = ("min", "max")


class MetricTable:
    """Metric names with their reductions, equal on all ranks of a group, which call `add` with the same entries.

    A name that gets another reduction in a later step is a further entry.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, Reduction], None] = {}

    def unknown(self, metrics: Metrics) -> list[tuple[str, Reduction]]:
        """Return (name, reduction) of the metrics that the table lacks."""
        return [(name, kind) for name, (kind, _, _) in metrics.items() if (name, kind) not in self._entries]

    def add(self, entries: Iterable[tuple[str, Reduction]]) -> None:
        """Add names with their reductions, unless the table has them."""
        self._entries |= dict.fromkeys(entries)

    def row(self, metrics: Metrics) -> Tensor:
        """Return this rank's metrics as a row of numbers: float64 [1 + 4 * names], see the module's docstring."""
        missing = float(len(self.unknown(metrics)))
        sums, largest, known = [missing], [], dict(metrics.items())
        for name, kind in self._entries:
            kind_here, value, count = known.get(name, ("", 0.0, 0.0))
            here = kind_here == kind
            extreme = here and kind in _EXTREMES and not math.isnan(value)
            total = float(extreme) if kind in _EXTREMES else value if here else 0.0
            sums += [total, count if here else 0.0, float(here)]
            largest.append((-value if kind == "min" else value) if extreme else -math.inf)
        return torch.tensor(sums + largest, dtype=torch.float64)

    def combine(self, row: Tensor, other: Tensor) -> None:
        """Merge `other`, the combined row of other ranks, into `row`."""
        sums = 1 + _PER_NAME * len(self._entries)
        row[:sums] += other[:sums]
        torch.maximum(row[sums:], other[sums:], out=row[sums:])

    def metrics(self, row: Tensor) -> Metrics | None:
        """Return the metrics of all ranks from their combined row; None: some rank has names that the table lacks.

        Raises:
            ValueError: ranks have a name with different reductions.
        """
        numbers = row.tolist()
        if numbers[0]:
            return None
        items: dict[str, list] = {}
        largest = numbers[1 + _PER_NAME * len(self._entries) :]
        for i, (name, kind) in enumerate(self._entries):
            total, count, ranks = numbers[1 + _PER_NAME * i : 1 + _PER_NAME * (i + 1)]
            if kind in _EXTREMES:
                total, count = (largest[i] if total else math.nan), 0.0
            if ranks and name in items:
                raise ValueError(
                    f"metric {name!r} is reduced by {items[name][0]!r} on some ranks and by {kind!r} on others"
                )
            if ranks:
                items[name] = [kind, -total if kind == "min" else total, count]
        return Metrics.from_json(items)
