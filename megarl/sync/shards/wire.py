"""Chooses what crosses the network to a cell (servers that share a process group): each box (a rectangular part of a
tensor) once for every rank that stores it, or once for all ranks of a machine, which then exchange shares of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from megarl.sync.shards.assign import ReceivingRank
from megarl.sync.shards.cuts import PartTable, cut_parts
from megarl.sync.shards.links import NeedTable
from megarl.sync.shards.table import Array, ColumnTable

FAN_GAIN = 1.25
"""Each rank of a machine receives a stripe (an equal share) of boxes that several of them store, and they exchange the
stripes, if otherwise one of them would receive more than this many times its equal share of the machine's bytes."""
_STRIPE = 1 << 16  # a box (a rectangular part of a tensor) is not cut into pieces of fewer bytes at borders of stripes


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
    """The server ranks that store the boxes which are sent to a cell, ordered by box.

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
        step: int64, for each tensor the number of rows that are never cut apart (an FP8 block, or 1).
    """

    table: NeedTable
    first: Sequence[int]
    last: Sequence[int]
    holders: Array
    step: Array


def cell_wire(cell: Sequence[int], receivers: Sequence[ReceivingRank], needs: NeedRows) -> CellWire:
    """Return what is sent to one cell, which has the server ranks with the numbers `cell`."""
    machines: dict[str, list[int]] = {}
    for number in cell:
        machines.setdefault(receivers[number].place.machine, []).append(number)
    boxes: list[WireTable] = []
    targets: list[WireTargets] = []
    parts: list[PartTable] = []
    ends: list[Array] = []
    fans: list[tuple[int, ...]] = []
    count = 0
    for members in machines.values():
        machine = _MachineNeeds(members, needs)
        box, target, part, receiver, groups = machine.fanned() if machine.gains() else machine.plain()
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
    """Return the first dimension of each box that has more than one element: int64 [n] for sizes int64 [n, DIMS]."""
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


class _MachineNeeds:
    """Decides how the boxes that a cell's ranks on one machine need are sent to them; `members`: numbers of these
    ranks."""

    def __init__(self, members: list[int], needs: NeedRows) -> None:
        self.members, self.needs = members, needs
        spans = [(needs.first[number], needs.last[number]) for number in members]
        self.need = np.concatenate([np.arange(*span) for span in spans])
        self.member = np.repeat(np.arange(len(members)), [end - start for start, end in spans])
        self.table = needs.table.take(self.need)
        self.who = np.array(members)[self.member]
        self.holders = needs.holders[self.table.box]
        size = self.table.hi - self.table.lo
        self.extent = np.take_along_axis(size, extent_dim(size)[:, None], 1)[:, 0]

    def gains(self) -> bool:
        """Return whether each rank should receive stripes (shares) of the boxes, which the ranks then exchange."""
        if len(self.members) == 1:
            return False
        self.box = self._equal_boxes()
        unique = np.zeros(self.box.max() + 1, np.int64)
        unique[self.box] = self.table.nbytes
        most = np.bincount(self.member, self.table.nbytes).max()
        return bool(most > FAN_GAIN * unique.sum() / len(self.members))

    def plain(self) -> tuple[WireTable, WireTargets, PartTable, Array, list[tuple[int, ...]]]:
        """Return boxes, targets, parts, receivers and groups for ranks that each receive all that they store."""
        rows = np.arange(len(self.need))
        boxes = WireTable(self.need, self.holders, np.full(len(rows), -1))
        part = PartTable(rows, np.zeros_like(rows), self.extent, self.table.nbytes)
        return boxes, WireTargets(rows, self.who, self.need), part, self.who, []

    def fanned(self) -> tuple[WireTable, WireTargets, PartTable, Array, list[tuple[int, ...]]]:
        """Return boxes, targets, parts, receivers and groups for ranks that exchange stripes (shares) of boxes which
        several of them store."""
        order = np.argsort(self.box, kind="stable")
        first = order[np.flatnonzero(np.diff(self.box[order], prepend=-1))]  # first row of each box
        stored = np.zeros((len(first), len(self.members)), bool)
        stored[self.box, self.member] = True
        patterns, pattern = np.unique(np.packbits(stored, axis=1), axis=0, return_inverse=True)
        pattern = pattern.reshape(-1)
        groups = [np.flatnonzero(np.unpackbits(bits, count=len(self.members))) for bits in patterns]
        fans = [tuple(np.array(self.members)[group].tolist()) for group in groups if len(group) > 1]
        number = np.cumsum([len(group) > 1 for group in groups]) - 1
        fan = np.where([len(group) > 1 for group in groups], number, -1)[pattern]
        boxes = WireTable(self.need[first], self.holders[first], fan)
        rows = np.arange(len(first))
        whole = PartTable(rows, np.zeros_like(rows), self.extent[first], self.table.nbytes[first])
        parts, receiver = [whole.take(fan < 0)], [self.who[first][fan < 0]]
        order_of_boxes = np.lexsort((boxes.holders, fan))
        order_of_boxes = order_of_boxes[fan[order_of_boxes] >= 0]
        key = fan[order_of_boxes].astype(np.int64) << 32 | boxes.holders[order_of_boxes]
        for chosen in np.split(order_of_boxes, np.flatnonzero(np.diff(key)) + 1) if len(key) else []:
            share, ranks = whole.take(chosen), np.array(fans[fan[chosen[0]]])
            total = int(share.nbytes.sum())
            ends = total * np.arange(1, len(ranks) + 1) // len(ranks)
            least = min(_STRIPE, total // len(ranks) // 50)
            cut, stripe = cut_parts(share, ends, self.needs.step[self.table.tensor[first[chosen]]], least)
            parts.append(cut)
            receiver.append(ranks[stripe])
        targets = WireTargets(self.box[order], self.who[order], self.need[order])
        return boxes, targets, PartTable.joined(parts), np.concatenate(receiver), fans

    def _equal_boxes(self) -> Array:
        """Number the different boxes in `table` from 0, in order; return the number of each row's box: int64 [n]."""
        corners = np.concatenate([self.table.lo, self.table.hi], 1)
        order = np.lexsort((self.member, *corners.T[::-1], self.table.box))
        box, corners = self.table.box[order], corners[order]
        new = np.ones(len(order), bool)
        new[1:] = (box[1:] != box[:-1]) | (corners[1:] != corners[:-1]).any(1)
        number = np.zeros(len(order), np.int64)
        number[order] = np.cumsum(new) - 1
        return number
