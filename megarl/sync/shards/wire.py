"""Chooses what crosses the network to a cell (servers that share a process group): each box (a rectangular part of a
tensor) once for every rank that stores it, or once for all ranks of a machine, which then exchange shares of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np

from megarl.sync.shards.assign import ReceivingRank
from megarl.sync.shards.boxes import GpuPlace, ServerStorage
from megarl.sync.shards.cuts import PartTable, cut_parts
from megarl.sync.shards.links import NeedTable
from megarl.sync.shards.table import Array, ColumnTable

FAN_GAIN = 1.25
"""Each rank of a machine receives a stripe (an equal share) of boxes that several of them store, and they exchange the
stripes, if otherwise one of them would receive more than this many times its equal share of the machine's bytes."""
# Where one rank's stripe ends and the next one's begins, a box (a rectangular part of a tensor) is cut only into pieces
# of at least this many bytes; fewer if the stripes are small.
_STRIPE = 1 << 16


@dataclass(frozen=True, eq=False)
class WireTable(ColumnTable):
    """Boxes (rectangular parts of tensors) that are sent to a cell (servers that share a process group).

    Attributes:
        need: int32 [W], row in `NeedRows.table` of the first server rank that stores the box.
        holders: int32 [W], number of the set of trainer ranks that hold the box.
        fan: int32 [W], index in `CellWire.fans` of the ranks of a machine that each receive a share of the box; -1: one
            rank receives all of it.
    """

    need: Annotated[Array, "i4"]
    holders: Annotated[Array, "i4"]
    fan: Annotated[Array, "i4"]


@dataclass(frozen=True, eq=False)
class WireTargets(ColumnTable):
    """The server ranks that store the boxes (parts of tensors) which are sent to a cell (servers that share a process
    group), ordered by box.

    Attributes:
        box: int32 [U], row in `WireTable`.
        receiver: int32 [U], number of the server rank.
        need: int32 [U], row in `NeedRows.table` with the place where the rank stores the box.
    """

    box: Annotated[Array, "i4"]
    receiver: Annotated[Array, "i4"]
    need: Annotated[Array, "i4"]


@dataclass(frozen=True, eq=False)
class CellWire:
    """The boxes (rectangular parts of tensors) that are sent to one cell (servers that share a process group).

    Attributes:
        boxes, targets: the boxes, and the server ranks that store them.
        parts: the parts of boxes that each rank receives: whole boxes, and stripes, its shares of boxes that several
            ranks of its machine store.
        receiver: int64, number of the server rank that receives each part.
        fans: the groups of server ranks that exchange stripes, by the ranks' numbers.
        kinds: int64, for each part 0 if it is a whole box, or a number above 0 if it is a stripe. Groups whose stripes
            have the same number have no rank in common.
    """

    boxes: WireTable
    targets: WireTargets
    parts: PartTable
    receiver: Array
    fans: tuple[tuple[int, ...], ...]
    kinds: Array


@dataclass(frozen=True)
class NeedRows:
    """The needs of all receivers (server ranks) of a plan. Each receiver has consecutive rows of a table; those of
    receivers that store the model alike are the same.

    Attributes:
        table: the parts of boxes (rectangular parts of tensors) that the receivers need.
        first, last: for each receiver its first row, and the row after its last one.
        holders: int32, for each of the trainer's boxes the number of the set of ranks that hold it.
    """

    table: NeedTable
    first: Sequence[int]
    last: Sequence[int]
    holders: Array


def machines_of(servers: Sequence[ServerStorage], needs: NeedRows, trainers: TrainerHolders) -> dict[str, MachineNeeds]:
    """Return, by the name of each machine with server ranks, the boxes (parts of tensors) that they need.

    `needs`: the boxes of all server ranks; `trainers`: the trainer ranks that hold each box, with their machines.
    """
    members: dict[str, list[int]] = {}
    places = (place for server in servers for place in server.places)
    for number, place in enumerate(places):
        members.setdefault(place.machine, []).append(number)
    return {name: MachineNeeds(ranks, needs, trainers.near(name)) for name, ranks in members.items()}


def cell_wire(
    cell: Sequence[int], receivers: Sequence[ReceivingRank], needs: NeedRows, machines: Mapping[str, MachineNeeds]
) -> CellWire:
    """Return what is sent to one cell (servers that share a process group).

    Args:
        cell: the numbers of all server ranks in this cell.
        machines: the needs of the ranks on each machine. If ranks on a machine exchange stripes (shares of what several
            of them need), all ranks on this machine are in one cell.
    """
    members: dict[str, list[int]] = {}
    for number in cell:
        members.setdefault(receivers[number].place.machine, []).append(number)
    boxes: list[WireTable] = []
    targets: list[WireTargets] = []
    parts: list[PartTable] = []
    ends: list[Array] = []
    fans: list[tuple[int, ...]] = []
    count = 0
    for name, ranks in members.items():
        machine = machines[name]
        wires = machine.fanned() if machine.gathers else machine.plain(ranks, needs)
        for box, target, part, receiver, groups in wires:
            boxes.append(box.replace(fan=np.where(box.fan >= 0, box.fan + len(fans), -1)))
            targets.append(target.replace(box=target.box + count))
            parts.append(part.replace(row=part.row + count))
            ends.append(receiver)
            fans += groups
            count += len(box)
    joined, part = WireTable.joined(boxes), PartTable.joined(parts)
    kind_of_fan = np.array([*_kinds(fans), 0], np.int64)
    kinds = kind_of_fan[joined.fan[part.row]]
    return CellWire(joined, WireTargets.joined(targets), part, np.concatenate(ends), tuple(fans), kinds)


def extent_dim(size: Array) -> Array:
    """Return for each box (part of a tensor) its first dimension with more than one element: int64 [n].

    Args:
        size: int64 [n, DIMS], size of each dimension.
    """
    return (size > 1).argmax(1)


def _kinds(fans: Sequence[Sequence[int]]) -> list[int]:
    """Return a number above 0 for each group of ranks; groups with a rank in common get different numbers."""
    members: list[set[int]] = []
    kinds = []
    for fan in fans:
        kind = next((i for i, ranks in enumerate(members) if ranks.isdisjoint(fan)), len(members))
        if kind == len(members):
            members.append(set())
        members[kind].update(fan)
        kinds.append(kind + 1)
    return kinds


#: Boxes, targets, parts, number of the receiver of each part, and groups of ranks that exchange stripes.
_Wire = tuple[WireTable, WireTargets, PartTable, Array, list[tuple[int, ...]]]


class TrainerHolders:
    """The machines on which trainer ranks hold each box (part of a tensor).

    Args:
        sets: the sets of ranks that hold a box.
        places: where each rank runs.
    """

    def __init__(self, sets: Sequence[tuple[int, ...]], places: Sequence[GpuPlace]) -> None:
        self._machines = [{places[rank].machine for rank in ranks} for ranks in sets]

    def near(self, machine: str) -> Array:
        """Return for each set of ranks whether one of them runs on `machine`: bool [sets]."""
        return np.array([machine in names for names in self._machines], bool)


@dataclass(frozen=True, eq=False)
class _MachineRows:
    """Needs of server ranks on one machine: in each row a part of a tensor that one of them needs.

    Attributes:
        members: numbers of the server ranks.
        need: int64 [n], row in `NeedRows.table`.
        member: int64 [n], index in `members` of the rank that needs this part.
        table: these rows of `NeedRows.table`.
        holders: int32 [n], number of the set of trainer ranks that hold the part.
    """

    members: Sequence[int]
    need: Array
    member: Array
    table: NeedTable
    holders: Array

    @classmethod
    def of(cls, members: Sequence[int], needs: NeedRows) -> _MachineRows:
        """Return all needs of the server ranks with the numbers `members`."""
        spans = [(needs.first[number], needs.last[number]) for number in members]
        need = np.concatenate([np.arange(*span) for span in spans])
        member = np.repeat(np.arange(len(members)), [end - start for start, end in spans])
        table = needs.table.take(need)
        return cls(members, need, member, table, needs.holders[table.box])

    def take(self, rows: Array) -> _MachineRows:
        """Return the given rows: int [n], or bool for each row."""
        need, member, holders = self.need[rows], self.member[rows], self.holders[rows]
        return _MachineRows(self.members, need, member, self.table.take(rows), holders)

    @property
    def who(self) -> Array:
        """Number of the server rank that needs each row: int64 [n]."""
        return np.array(self.members)[self.member]

    @property
    def extent(self) -> Array:
        """Size of each part along its first dimension with more than one element: int64 [n]."""
        size = self.table.hi - self.table.lo
        return np.take_along_axis(size, extent_dim(size)[:, None], 1)[:, 0]


class MachineNeeds:
    """The boxes (parts of tensors) that the server ranks on one machine store and therefore need in a weight update.

    Several ranks may store the same box. Either each of them receives all of it, or each receives only a share of it (a
    stripe) over the network, and the ranks exchange the stripes inside the machine. If a trainer rank on this machine
    has the box, it does not cross the network, and is sent whole to each rank that stores it.

    Args:
        members: numbers of the server ranks on the machine.
        near: bool, for each set of trainer ranks whether one of them runs on this machine.
    """

    def __init__(self, members: Sequence[int], needs: NeedRows, near: Array) -> None:
        rows = _MachineRows.of(members, needs)
        self._all = self._far = rows
        self._near: _MachineRows | None = None
        is_near = near[rows.holders]
        if is_near.any():
            self._near, self._far = rows.take(is_near), rows.take(~is_near)

    @cached_property
    def gathers(self) -> bool:
        """Whether the ranks receive stripes (shares) of boxes that several of them need, and exchange them."""
        far = self._far
        if len(np.unique(far.member)) < 2:
            return False
        unique = np.zeros(self._box.max() + 1, np.int64)
        unique[self._box] = far.table.nbytes
        most = np.bincount(far.member, far.table.nbytes).max()
        return bool(most > FAN_GAIN * unique.sum() / len(far.members))

    @cached_property
    def _box(self) -> Array:
        return _equal_boxes(self._far)

    def fanned(self) -> list[_Wire]:
        """Return what is sent if the ranks exchange stripes (shares of what several of them need) of everything that
        crosses the network."""
        near = [] if self._near is None else [_plain(self._near)]
        return [_fanned(self._far, self._box), *near]

    def plain(self, ranks: Sequence[int], needs: NeedRows) -> list[_Wire]:
        """Return what is sent to some `ranks` on the machine if each of them receives all that it stores."""
        return [_plain(self._all if list(ranks) == list(self._all.members) else _MachineRows.of(ranks, needs))]


def _plain(rows: _MachineRows) -> _Wire:
    """Return what is sent if each server rank receives all that it stores."""
    count = np.arange(len(rows.need))
    boxes = WireTable(rows.need, rows.holders, np.full(len(count), -1))
    part = PartTable(count, np.zeros_like(count), rows.extent, rows.table.nbytes)
    return boxes, WireTargets(count, rows.who, rows.need), part, rows.who, []


def _fanned(rows: _MachineRows, box: Array) -> _Wire:
    """Return what is sent if server ranks that store the same boxes (parts of tensors) each receive a stripe (a share)
    of them, which they then exchange.

    Args:
        box: the number of each row's box, from `_equal_boxes`.
    """
    order = np.argsort(box, kind="stable")
    first = order[np.flatnonzero(np.diff(box[order], prepend=-1))]  # first row of each box
    stored = np.zeros((len(first), len(rows.members)), bool)
    stored[box, rows.member] = True
    patterns, pattern = np.unique(np.packbits(stored, axis=1), axis=0, return_inverse=True)
    pattern = pattern.reshape(-1)
    groups = [np.flatnonzero(np.unpackbits(bits, count=len(rows.members))) for bits in patterns]
    fans = [tuple(np.array(rows.members)[group].tolist()) for group in groups if len(group) > 1]
    number = np.cumsum([len(group) > 1 for group in groups]) - 1
    fan = np.where([len(group) > 1 for group in groups], number, -1)[pattern]
    boxes = WireTable(rows.need[first], rows.holders[first], fan)
    count = np.arange(len(first))
    whole = PartTable(count, np.zeros_like(count), rows.extent[first], rows.table.nbytes[first])
    parts, receiver = [whole.take(fan < 0)], [rows.who[first][fan < 0]]
    order_of_boxes = np.lexsort((boxes.holders, fan))
    order_of_boxes = order_of_boxes[fan[order_of_boxes] >= 0]
    key = fan[order_of_boxes].astype(np.int64) << 32 | boxes.holders[order_of_boxes]
    for chosen in np.split(order_of_boxes, np.flatnonzero(np.diff(key)) + 1) if len(key) else []:
        share, ranks = whole.take(chosen), np.array(fans[fan[chosen[0]]])
        total = int(share.nbytes.sum())
        ends = total * np.arange(1, len(ranks) + 1) // len(ranks)
        least = min(_STRIPE, total // len(ranks) // 50)
        cut, stripe = cut_parts(share, ends, least)
        parts.append(cut)
        receiver.append(ranks[stripe])
    targets = WireTargets(box[order], rows.who[order], rows.need[order])
    return boxes, targets, PartTable.joined(parts), np.concatenate(receiver), fans


def _equal_boxes(rows: _MachineRows) -> Array:
    """Number the different boxes (parts of tensors) in `rows` from 0, in order; return the number of each row's box:
    int64 [n]."""
    corners = np.concatenate([rows.table.lo, rows.table.hi], 1)
    order = np.lexsort((rows.member, *corners.T[::-1], rows.table.box))
    box, corners = rows.table.box[order], corners[order]
    new = np.ones(len(order), bool)
    new[1:] = (box[1:] != box[:-1]) | (corners[1:] != corners[:-1]).any(1)
    number = np.zeros(len(order), np.int64)
    number[order] = np.cumsum(new) - 1
    return number
