"""Metrics whose reduction over micro-batches and ranks is declared when recorded, never guessed from a name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

Reduction = Literal["mean", "sum", "min", "max"]
_MERGE = {
    "sum": lambda a, b: a + b,
    "min": lambda a, b: b if math.isnan(a) else (a if math.isnan(b) else min(a, b)),
    "max": lambda a, b: b if math.isnan(a) else (a if math.isnan(b) else max(a, b)),
}


class Metrics:
    """A collection of named partial results that merges exactly.

    A mean is stored as (total, count), so merging gives the exact mean over all items.

    >>> a, b = Metrics(), Metrics()
    >>> a.mean("reward", total=3.0, count=4); b.mean("reward", total=1.0, count=1)
    >>> a.merge(b).result()
    {'reward': 0.8}
    """

    def __init__(self) -> None:
        self._items: dict[str, tuple[Reduction, float, float]] = {}

    def mean(self, name: str, total: float, count: float) -> None:
        """Add `count` items whose sum is `total` to the mean `name`."""
        self._add(name, "mean", float(total), float(count))

    def sum(self, name: str, value: float) -> None:
        """Add `value` to a total."""
        self._add(name, "sum", float(value), 0.0)

    def min(self, name: str, value: float) -> None:
        """Add `value` to the minimum `name`; NaN counts as no value."""
        self._add(name, "min", float(value), 0.0)

    def max(self, name: str, value: float) -> None:
        """Add `value` to the maximum `name`; NaN counts as no value."""
        self._add(name, "max", float(value), 0.0)

    def _add(self, name: str, kind: Reduction, value: float, count: float) -> None:
        if name not in self._items:
            self._items[name] = (kind, value, count)
            return
        old_kind, old, old_count = self._items[name]
        if old_kind != kind:
            raise ValueError(f"metric {name!r} was declared {old_kind!r} and is now used as {kind!r}")
        if kind == "mean":
            self._items[name] = (kind, old + value, old_count + count)
        else:
            self._items[name] = (kind, _MERGE[kind](old, value), 0.0)

    def pop(self, name: str) -> tuple[Reduction, float, float]:
        """Remove a metric and return its reduction, its value (for a mean the total), and its count (of a mean)."""
        return self._items.pop(name)

    def merge(self, other: Metrics) -> Metrics:
        """Merge `other` into this collection and return this collection."""
        for name, (kind, value, count) in other._items.items():
            self._add(name, kind, value, count)
        return self

    def renamed(self, name_of: Callable[[str], str]) -> Metrics:
        """Return the same metrics, each under the name that `name_of` returns for its name."""
        return Metrics.from_json({name_of(name): list(item) for name, item in self._items.items()})

    def result(self) -> dict[str, float]:
        """Return the reduced metrics by name; a mean over no values is NaN."""
        return {
            name: (value / count if count else math.nan) if kind == "mean" else value
            for name, (kind, value, count) in self._items.items()
        }

    def to_json(self) -> dict[str, list]:
        """Return the metrics as plain data for `from_json`."""
        return {name: list(item) for name, item in self._items.items()}

    @classmethod
    def from_json(cls, data: dict[str, list]) -> Metrics:
        """Return the metrics whose `to_json` is `data`."""
        bag = cls()
        for name, (kind, value, count) in data.items():
            bag._add(name, kind, value, count)
        return bag

    def go_back_to(self, data: dict[str, list]) -> None:
        """Set the metrics to those whose `to_json` is `data`."""
        self._items = Metrics.from_json(data)._items

    def items(self) -> Iterator[tuple[str, tuple[Reduction, float, float]]]:
        """Iterate over (name, (reduction, value, count)); for a mean, value is the total of `count` values."""
        return iter(self._items.items())

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)
