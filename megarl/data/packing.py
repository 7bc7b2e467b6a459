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
    """Pack sequences into micro-batches of at most `budget` tokens by best-fit decreasing, then make these nearly even.

    A sequence longer than the budget gets a micro-batch of its own. Returns the sequence indices of each micro-batch,
    in rising order; every index is in exactly one, and none is empty. The result is deterministic.

    Best-fit decreasing needs at most 11/9 * optimum + 6/9 micro-batches (Dosa 2007).

    >>> pack([6, 5, 4, 3, 2], 10)
    [[0, 2], [1, 3, 4]]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if budget < 1:
        raise ValueError(f"the token budget must be positive, got {budget}")
    return split_to_count(sizes, len(_best_fit(sizes, budget)), budget)


def bundles(
    lengths: Sequence[int], shared: Sequence[Mapping[int, int]], budget: int
) -> tuple[list[list[int]], list[int]]:
    """Group sequences that share extra input (a teacher's context, for example), so that it is processed only once.

    Returns the sequence indices of each bundle and its cost in tokens. A bundle costs at most `budget` where its
    sequences allow that. If bundling would need more micro-batches than single sequences, every sequence is a bundle.

    Args:
        lengths: tokens of each sequence.
        shared: for each sequence, the extra inputs that it needs: id -> cost in tokens.

    >>> bundles([3, 3, 3, 2], [{7: 4}, {7: 4}, {}, {7: 4}], 10)
    ([[0, 1], [2], [3]], [10, 3, 6])
    """
    each = [[number] for number in range(len(lengths))]
    if not any(shared):
        return each, list(lengths)
    extra = [sum(inputs.values()) for inputs in shared]
    single = [length + more for length, more in zip(lengths, extra, strict=True)]
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, inputs in enumerate(shared):
        alike.setdefault(tuple(sorted(inputs)) or (-1, number), []).append(number)
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
    """Divide sequences into exactly `count` micro-batches with nearly equal token totals.

    All ranks can thus run the same number of micro-batches. Returns the sequence indices of each micro-batch.

    Micro-batches are empty only when there are fewer sequences than `count`; empty ones come last. With a budget,
    no micro-batch of two or more sequences exceeds it.

    Raises:
        ValueError: `count` is smaller than the number of micro-batches that `pack(lengths, budget)` needs.

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
    """Return the micro-batches in the order of their first sequence, empty ones last. Raise ValueError if there are not
    `count`."""
    if len(parts) != count:
        raise ValueError(f"count is {count}, but the sequences need {len(parts)} micro-batches")
    return sorted(parts, key=lambda part: part[0] if part else float("inf"))


def _divide(parts: list[list[int]], count: int) -> list[list[int]]:
    """Split the micro-batch with the most sequences into two, until there are `count`; a part may become empty."""
    parts = list(parts)
    while len(parts) < count:
        most = max(range(len(parts)), key=lambda number: (len(parts[number]), -number))
        items = parts[most]
        parts[most] = items[::2]
        parts.append(items[1::2])
    return parts


def _best_fit(sizes: np.ndarray, budget: int) -> list[list[int]]:
    """Pack sequences, the longest first, each into the fullest micro-batch that still has room for it."""
    parts: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, micro-batch), in ascending order
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
