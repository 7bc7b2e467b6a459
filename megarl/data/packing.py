"""Micro-batches: which sequences go through the model together."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.data.balance import balance

if TYPE_CHECKING:
    from megarl.data.balance import Lengths

__all__ = ["balance", "bundles", "pack", "split_to_count"]


def pack(lengths: Lengths, budget: int) -> list[list[int]]:
    """Pack sequences into micro-batches of at most `budget` tokens by best-fit decreasing, made as even as possible.

    A sequence longer than the budget is a micro-batch by itself. Every index is in exactly one micro-batch, in
    rising order; no micro-batch is empty; no sequences give no micro-batches. Deterministic.

    Best-fit decreasing needs at most 11/9 of the optimum plus 6/9 (Dosa 2007).

    >>> pack([6, 5, 4, 3, 2], 10)
    [[0, 2], [1, 3, 4]]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if budget < 1:
        raise ValueError(f"token budget must be positive, got {budget}")
    return split_to_count(sizes, len(_best_fit(sizes, budget)), budget)


def bundles(
    lengths: Sequence[int], shared: Sequence[Mapping[int, int]], budget: int
) -> tuple[list[list[int]], list[int]]:
    """Return sequences that are packed as one, since they share something, and the cost of each such bundle.

    Sequences that share the same are together as far as the budget takes them, unless that needs more micro-batches
    than all sequences by themselves do.

    Args:
        lengths: tokens of each sequence.
        shared: what each sequence needs in addition, by name, and how many tokens it counts for.

    >>> bundles([3, 3, 3, 2], [{7: 4}, {7: 4}, {}, {7: 4}], 10)
    ([[0, 1], [2], [3]], [10, 3, 6])
    """
    each = [[number] for number in range(len(lengths))]
    if not any(shared):
        return each, list(lengths)
    extra = [sum(own.values()) for own in shared]
    single = [length + more for length, more in zip(lengths, extra, strict=True)]
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, own in enumerate(shared):
        alike.setdefault(tuple(sorted(own)) or (-1, number), []).append(number)
    joined = list[list[int]]()
    for same in alike.values():
        room = max(1, budget - extra[same[0]])
        joined += [[same[place] for place in part] for part in pack([lengths[number] for number in same], room)]
    joined.sort()
    costs = [extra[part[0]] + sum(lengths[number] for number in part) for part in joined]
    if len(pack(costs, budget)) > len(pack(single, budget)):
        return each, single
    return joined, costs


def split_to_count(lengths: Lengths, count: int, budget: int | None = None) -> list[list[int]]:
    """Return exactly `count` micro-batches of totals as even as possible, so that all ranks can run the same number.

    Micro-batches are empty only when there are fewer sequences than `count`; empty ones come last. With a budget,
    no micro-batch of two or more sequences exceeds it.

    Raises:
        ValueError: `count` is smaller than what `pack(lengths, budget)` needs.

    >>> split_to_count([3, 3, 3], 2), split_to_count([7], 2)
    ([[0, 2], [1]], [[0], []])
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if budget is None:
        return _ordered(balance(sizes, count) if count else [], count)
    large = np.flatnonzero(sizes > budget).tolist()
    rest = np.flatnonzero(sizes <= budget)
    room = count - len(large)
    parts = balance(sizes[rest], room) if room > 0 else []
    if len(rest) and (not parts or max(int(sizes[rest[part]].sum()) for part in parts) > budget):
        parts = _divide(_best_fit(sizes[rest], budget), room)
    return _ordered([[item] for item in large] + [rest[part].tolist() for part in parts], count)


def _ordered(parts: list[list[int]], count: int) -> list[list[int]]:
    """Return the micro-batches by their first sequence, empty ones last."""
    if len(parts) != count:
        raise ValueError(f"{len(parts)} micro-batches are needed, {count} were asked for")
    return sorted(parts, key=lambda part: part[0] if part else float("inf"))


def _divide(parts: list[list[int]], count: int) -> list[list[int]]:
    """Halve the parts with the most sequences until there are `count`; a part of one leaves an empty half."""
    parts = list(parts)
    while len(parts) < count:
        most = max(range(len(parts)), key=lambda number: (len(parts[number]), -number))
        items = parts[most]
        parts[most] = items[::2]
        parts.append(items[1::2])
    return parts


def _best_fit(sizes: np.ndarray, budget: int) -> list[list[int]]:
    """Pack the longest first, each into the fullest micro-batch that still has room."""
    parts: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, micro-batch), sorted
    order = np.argsort(-sizes, kind="stable")
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        place = bisect.bisect_left(room, (size, -1))
        if place == len(room):
            parts.append([item])
            if size <= budget:
                bisect.insort(room, (budget - size, len(parts) - 1))
        else:
            left, part = room.pop(place)
            parts[part].append(item)
            bisect.insort(room, (left - size, part))
    return [sorted(part) for part in parts]
