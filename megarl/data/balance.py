"""Shares of nearly equal total length: groups or samples over replicas, sequences over micro-batches.

The start is greedy. Each round then pairs the heaviest part with the lightest, the second heaviest with the second
lightest and so on, and each pair exchanges the two items that make it most even. One sort and one binary search solve
all pairs of a round, so 8192 lengths over 512 ranks take milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:  # the process of the buffer balances groups without torch
    from torch import Tensor

    Lengths: TypeAlias = Sequence[int] | np.ndarray | Tensor

# Largest items * parts for which the k-way Karmarkar-Karp start, O(n k log k), is worth its time.
_DIFFERENCING_LIMIT = 4_096
_MAX_ROUNDS = 32
# Largest part over the mean at which the search for exchanges stops.
_EVEN = 1.02


def balance(lengths: Lengths, k: int, equal_counts: bool = False) -> list[list[int]]:
    """Split items 0..n-1 into k parts with nearly equal totals; the items of a part are in rising order.

    Args:
        lengths: n non-negative integers.
        k: number of parts; parts stay empty when n < k.
        equal_counts: the numbers of items per part differ by at most one.

    Sources: Graham's longest-first rule (SIAM J. Appl. Math. 1969), Karmarkar and Karp's differencing (1982).
    Deterministic: equal inputs give equal parts on every rank.

    >>> balance([5, 4, 3, 2], 2)
    [[0, 3], [1, 2]]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim != 1 or k < 1 or (len(sizes) and sizes.min() < 0):
        raise ValueError(
            f"balancing needs k >= 1 and non-negative lengths [n], got k={k}, lengths of shape {sizes.shape}"
        )
    if equal_counts:
        table = _rows(sizes, k)
    else:
        starts = [_longest_first(sizes, k)]
        if len(sizes) * k <= _DIFFERENCING_LIMIT:
            starts.append(_differencing(sizes, k))
        parts = min(starts, key=lambda parts: max(int(sizes[part].sum()) for part in parts))
        # Every part gets a free place: swapping an item with a free place moves the item to another part.
        table = np.full((k, max(map(len, parts)) + 1), -1, dtype=np.int64)
        for part, items in enumerate(parts):
            table[part, : len(items)] = items
    _exchange(table, sizes, fixed_counts=equal_counts)
    return [sorted(row[row >= 0].tolist()) for row in table]


def rebalance(lengths: Lengths, owners: Sequence[int] | np.ndarray, k: int) -> np.ndarray:
    """Move items between k parts until the parts have nearly equal totals, and return each item's new part, int64 [n].

    Most items stay where they are, unlike with `balance`. Deterministic: equal inputs give equal parts on every rank.

    Args:
        lengths: n non-negative integers.
        owners: the part that has each item now.

    >>> rebalance([5, 4, 1, 2], [0, 0, 1, 1], 2).tolist()
    [0, 1, 0, 1]
    """
    sizes, owners = np.asarray(lengths, dtype=np.int64), np.asarray(owners, dtype=np.int64)
    counts = np.bincount(owners, minlength=k)
    # Each part has more free places than the fullest part has items: a part of few long items may get many short ones.
    table = np.full((k, 2 * int(counts.max(initial=0)) + 1), -1, dtype=np.int64)
    order = np.argsort(owners, kind="stable")
    table[owners[order], np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)] = order
    _exchange(table, sizes, fixed_counts=False)
    new = np.empty_like(owners)
    for part, items in enumerate(_balanced([row[row >= 0].tolist() for row in table], sizes)):
        new[items] = part
    return new


def _longest_first(sizes: np.ndarray, k: int) -> list[list[int]]:
    """Give each item, longest first, to the part with the smallest total, or the fewest items if totals are equal."""
    heap = [(0, 0, part) for part in range(k)]
    parts: list[list[int]] = [[] for _ in range(k)]
    order = np.argsort(-sizes, kind="stable")
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        total, count, part = heap[0]
        heapq.heapreplace(heap, (total + size, count + 1, part))
        parts[part].append(item)
    return parts


def _differencing(sizes: np.ndarray, k: int) -> list[list[int]]:
    """Partition by Karmarkar-Karp for k parts: merge the two most uneven partial solutions, heavy onto light, until one
    is left."""
    empty: list[tuple[int, list[int]]] = [(0, [])] * (k - 1)
    heap = [(-size, item, [(size, [item]), *empty]) for item, size in enumerate(sizes.tolist())]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, tie, second = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(k)]


def _rows(sizes: np.ndarray, k: int) -> np.ndarray:
    """Return k parts of nearly equal counts [k, width], with -1 for none: of the next k longest items, the longest goes
    to the part with the smallest total, and so on."""
    width = -(-len(sizes) // k)
    order = np.full(width * k, -1, dtype=np.int64)
    order[: len(sizes)] = np.argsort(-sizes, kind="stable")
    table = np.empty((k, width), dtype=np.int64)
    totals = np.zeros(k, dtype=np.int64)
    padded = np.append(sizes, 0)  # item -1, an unused place, has length 0
    for column in range(width):
        row = order[column * k : (column + 1) * k]
        lightest_first = np.argsort(totals, kind="stable")
        table[lightest_first, column] = row
        totals[lightest_first] += padded[row]
    return table


def _exchange(table: np.ndarray, sizes: np.ndarray, *, fixed_counts: bool) -> None:
    """Exchange items in place between the heaviest and the lightest part, the second heaviest and the second lightest,
    and so on, until no pair gets more even, at most `_MAX_ROUNDS` times."""
    k, width = table.shape
    if k < 2 or width == 0:
        return
    padded = np.append(sizes, 0)
    order = np.append(sizes, -1)  # sort key: unused places of a part come before its items, even those of length 0
    pairs = np.arange(k // 2)
    # The lengths in a pair of parts get an offset of the pair's own, so that one sorted list serves all pairs.
    gap = 4 * (int(sizes.sum()) + 1)
    for _ in range(_MAX_ROUNDS):
        totals = padded[table].sum(1)
        rank = np.argsort(-totals, kind="stable")
        if totals[rank[0]] - totals[rank[-1]] <= 1:
            return
        heavy, light = rank[: k // 2], rank[::-1][: k // 2]
        surplus = totals[heavy] - totals[light]
        table[light] = np.take_along_axis(table[light], np.argsort(order[table[light]], axis=1, kind="stable"), 1)
        give, take = padded[table[heavy]], padded[table[light]]
        # The best exchange for an item of length x is one of length x - surplus / 2: look at both its neighbours.
        keys = (2 * take + pairs[:, None] * gap).ravel()
        wanted = 2 * give - surplus[:, None] + pairs[:, None] * gap
        right = np.searchsorted(keys, wanted.ravel()).reshape(wanted.shape) - pairs[:, None] * width
        # Exchanging an unused place moves one item to the other part. With `fixed_counts`, forbid this if both parts
        # have unused places: their numbers of items would drift apart.
        first = np.zeros((len(pairs), 1), dtype=np.int64)
        if fixed_counts:
            first[:, 0] = (table[light[:, None], 0] < 0).any(1) & (table[heavy] < 0).any(1)
        near = np.stack([np.clip(right - 1, first, width - 1), np.clip(right, first, width - 1)], axis=2)
        got = np.take_along_axis(take, near.reshape(len(pairs), -1), 1).reshape(near.shape)
        left_over = np.abs(surplus[:, None, None] - 2 * (give[:, :, None] - got))
        best = left_over.reshape(len(pairs), -1).argmin(1)
        better = left_over.reshape(len(pairs), -1)[pairs, best] < surplus
        if not better.any():
            return
        i = best[better] // 2
        j = near.reshape(len(pairs), -1)[pairs[better], best[better]]
        heavier, lighter = heavy[better], light[better]
        table[heavier, i], table[lighter, j] = table[lighter, j], table[heavier, i]


def share_groups(tokens: Sequence[int], parts: int, cuts: Sequence[int] = ()) -> list[list[int]]:
    """Assign the groups of a step to `parts` replicas: equally many of every mini-batch, with nearly equal tokens.

    Each mini-batch is divided separately and keeps its groups. The next mini-batch reduces the unevenness so far: its
    largest share goes to the replica with the fewest tokens.

    Args:
        tokens: tokens of each group of a step, in the order of the data.
        parts: number of replicas.
        cuts: places of the first group of every mini-batch but the first, ascending.

    Returns:
        Places of the groups of each replica, ascending. The numbers of groups of a mini-batch are equal where `parts`
        divides them, else they differ by at most one.

    >>> share_groups([9, 1, 9, 1], 2), share_groups([9, 1, 9, 1], 2, cuts=[2])
    ([[0, 1], [2, 3]], [[0, 3], [1, 2]])
    """
    sizes = np.asarray(tokens, dtype=np.int64)
    shares: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for start, end in _mini_batches(len(sizes), cuts):
        batch = sizes[start:end]
        sets = _balanced(balance(batch, parts, equal_counts=True), batch)
        fullest_first = sorted(sets, key=lambda places: -int(batch[places].sum()))
        least_first = sorted(range(parts), key=totals.__getitem__)
        for part, places in zip(least_first, fullest_first, strict=True):
            shares[part] += [start + place for place in places]
            totals[part] += int(batch[places].sum())
    return shares


def max_over_mean(tokens: Sequence[int], owners: Sequence[int], parts: int, cuts: Sequence[int] = ()) -> float:
    """Return the factor by which unequal shares lengthen a step's updates, if time is proportional to tokens.

    In each mini-batch the replica with the most tokens sets the time. The result is the sum of these largest shares
    over the mini-batches, divided by the same sum for equal shares.

    Args:
        tokens: tokens of each group of a step, in the order of the data.
        owners: replica of each group.
        parts: number of replicas.
        cuts: places of the first group of every mini-batch but the first, ascending.

    >>> max_over_mean([9, 1, 9, 1], [0, 1, 0, 1], 2), max_over_mean([9, 1, 9, 1], [0, 1, 1, 0], 2)
    (1.8, 1.0)
    """
    sizes, where = np.asarray(tokens, dtype=np.int64), np.asarray(owners, dtype=np.int64)
    if not sizes.sum():
        return 1.0
    most = sum(
        np.bincount(where[start:end], weights=sizes[start:end], minlength=parts).max()
        for start, end in _mini_batches(len(sizes), cuts)
    )
    return float(most * parts / sizes.sum())


def _mini_batches(count: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the range (start, end) of each mini-batch among `count` groups; `cuts` are the starts of all but the
    first."""
    return list(itertools.pairwise([0, *(cut for cut in cuts if 0 < cut < count), count]))


def _balanced(parts: list[list[int]], sizes: np.ndarray) -> list[list[int]]:
    """Exchange items between the fullest part and any other until no exchange makes it smaller, or it is near the mean.
    `_exchange` compares the fullest part with the lightest only, which is fast enough for hundreds of parts."""
    owner = np.zeros(len(sizes), dtype=np.int64)
    for part, items in enumerate(parts):
        owner[items] = part
    totals = np.array([sizes[items].sum() for items in parts])
    while True:
        full = int(totals.argmax())
        inside, others = np.flatnonzero(owner == full), np.flatnonzero(owner != full)
        if not len(others) or totals[full] * len(parts) <= _EVEN * totals.sum():
            break
        moved = sizes[inside][:, None] - sizes[others]
        after = np.maximum(totals[full] - moved, totals[owner[others]] + moved)
        give, take = np.unravel_index(after.argmin(), after.shape)
        if after[give, take] >= totals[full]:
            break
        other = owner[others[take]]
        totals[full] -= moved[give, take]
        totals[other] += moved[give, take]
        owner[inside[give]], owner[others[take]] = other, full
    return [np.flatnonzero(owner == part).tolist() for part in range(len(parts))]
