"""Which sample goes where: a pure function of what all ranks know about all samples, so all compute the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: (source part, position in it) of every sample of a destination part, in the order the part gets them.
Assignment = list[list[tuple[int, int]]]
Balance = Callable[[Sequence[int], int, bool], list[list[int]]]


@dataclass(frozen=True)
class PartInfo:
    """What a source part tells about its samples.

    Attributes:
        count: number of samples.
        ids: `sample_id` of each, or None.
        groups: name of the group that must stay together of each, or None.
        lengths: tokens of each; only needed for balancing.
    """

    count: int
    ids: list[str] | None = None
    groups: list[str] | None = None
    lengths: list[int] | None = None


def assign(
    parts: Sequence[PartInfo],
    n_dst: int,
    *,
    held: Sequence[Sequence[str] | None] | None = None,
    balance: Balance | None = None,
    equal_counts: bool = False,
) -> Assignment:
    """Destination of every sample.

    In order of preference: back to the parts that already hold exactly these samples; balanced by tokens; or cut into
    runs of near-equal counts in source order. Groups are never split, except by what is already held.

    Args:
        parts: source parts in order.
        n_dst: destination parts.
        held: `sample_id`s each destination part works on already, or None.
        balance: `balance(lengths, k, equal_counts)` over groups; None: no balancing.
        equal_counts: passed to `balance`.
    """
    samples = [(part, i) for part, info in enumerate(parts) for i in range(info.count)]
    back = _send_back(parts, samples, held)
    if back is not None:
        return back
    units = _units(parts, samples)
    if balance is None:
        return [[samples[i] for unit in run for i in unit] for run in _runs(units, n_dst)]
    lengths = [length for info in parts for length in info.lengths or [1] * info.count]
    sets = balance([sum(lengths[i] for i in unit) for unit in units], n_dst, equal_counts)
    # Source order inside a part keeps the result independent of the order the balancer found things in.
    return [[samples[i] for unit in sorted(chosen) for i in units[unit]] for chosen in sets]


def _send_back(
    parts: Sequence[PartInfo], samples: list[tuple[int, int]], held: Sequence[Sequence[str] | None] | None
) -> Assignment | None:
    if held is None or any(ids is None for ids in held) or any(info.count and info.ids is None for info in parts):
        return None
    ids = [id for info in parts for id in info.ids or []]
    wanted = [id for part in held for id in part or []]
    place = dict(zip(ids, samples, strict=True))
    if len(place) != len(ids) or len(wanted) != len(ids) or set(wanted) != set(ids):
        return None
    return [[place[id] for id in part or []] for part in held]


def _units(parts: Sequence[PartInfo], samples: list[tuple[int, int]]) -> list[list[int]]:
    """Positions in `samples` that travel together, by first appearance."""
    if any(info.count and info.groups is None for info in parts):
        return [[i] for i in range(len(samples))]
    units: dict[str, list[int]] = {}
    for i, group in enumerate(group for info in parts for group in info.groups or []):
        units.setdefault(group, []).append(i)
    return list(units.values())


def _runs(units: list[list[int]], n: int) -> list[list[list[int]]]:
    """`n` runs of neighbouring units; each cut is the unit boundary nearest to the equal share."""
    total = sum(map(len, units))
    ends = [0]
    for unit in units:
        ends.append(ends[-1] + len(unit))
    cuts, place = [0], 0
    for k in range(1, n):
        while place < len(units) and abs(ends[place + 1] - total * k / n) <= abs(ends[place] - total * k / n):
            place += 1
        cuts.append(place)
    cuts.append(len(units))
    return [units[a:b] for a, b in itertools.pairwise(cuts)]
