"""Chooses the sender and the round of everything that is sent to each cell (servers that share a process group)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.sync.shards.assign import Demand, ReceivingRank, SenderLoads, TrainerParts, divide_trainer, nearest
from megarl.sync.shards.boxes import GpuPlace
from megarl.sync.shards.cuts import PartTable, cut_parts
from megarl.sync.shards.rounds import RoundLimits, rounds_of
from megarl.sync.shards.table import Array
from megarl.sync.shards.wire import CellWire, NeedRows


@dataclass(frozen=True, eq=False)
class CellShares:
    """Everything that is sent to one cell (servers that share a process group).

    Attributes:
        parts: parts of boxes (rectangular parts of tensors), in the order in which a message contains them.
        sender, receiver: int64 [n], trainer rank, and number of the server rank.
        kind: int64 [n], as `CellWire.kinds`.
        phase, number: int64 [n], the round, see `RoundTable`; 0 until `ShareScheduler.rounds` has chosen it.
    """

    parts: PartTable
    sender: Array
    receiver: Array
    kind: Array
    phase: Array
    number: Array

    def take(self, rows: Array) -> CellShares:
        """Return the given rows: int [n], or bool for each row."""
        columns = (self.sender, self.receiver, self.kind, self.phase, self.number)
        return CellShares(self.parts.take(rows), *(values[rows] for values in columns))


@dataclass(frozen=True, eq=False)
class _Groups:
    """Groups of the parts of tensors that are sent to a cell (servers that share a process group). Parts with the same
    receiver, set of trainer ranks that hold them, and kind (`CellWire.kinds`) form a group.

    Attributes:
        order: int64 [n], indices of the parts, group by group.
        lead: int64 [groups], index of the first part of each group.
        nbytes: int64 [groups], bytes of each group.
    """

    order: Array
    lead: Array
    nbytes: Array

    @classmethod
    def of(cls, key: Array, nbytes: Array) -> _Groups:
        order = np.argsort(key, kind="stable")
        first = np.flatnonzero(np.diff(key[order], prepend=-1))
        return cls(order, order[first], np.add.reduceat(nbytes[order], first))


class ShareScheduler:
    """Chooses which trainer rank sends each part of a box (a rectangular part of a tensor), and in which round.

    Args:
        receivers: the ranks of all servers.
        places: where each trainer rank runs.
        sets: the sets of trainer ranks that hold a box.
        needs: what each server rank needs.
        limits: limits of the rounds.
    """

    def __init__(
        self,
        receivers: Sequence[ReceivingRank],
        places: Sequence[GpuPlace],
        sets: Sequence[tuple[int, ...]],
        needs: NeedRows,
        limits: RoundLimits,
    ) -> None:
        self.receivers, self.places, self.sets, self.needs, self.limits = receivers, places, sets, needs, limits
        self._near: dict[tuple[int, str], Sequence[int]] = {}

    def shares(self, wires: Sequence[CellWire]) -> tuple[TrainerParts, list[CellShares]]:
        """Return how the trainer's ranks take turns in sending to the cells (servers that share a process group), and
        what each rank sends to each cell."""
        groups = [
            _Groups.of(
                (wire.receiver * len(self.sets) + wire.boxes.holders[wire.parts.row]) * (wire.kinds.max() + 1)
                + wire.kinds,
                wire.parts.nbytes,
            )
            for wire in wires
        ]
        pairs = list(zip(wires, groups, strict=True))
        holders = [wire.boxes.holders[wire.parts.row[group.lead]] for wire, group in pairs]
        receiver = np.concatenate([wire.receiver[group.lead] for wire, group in pairs])
        ends = zip(np.concatenate(holders).tolist(), receiver.tolist(), strict=True)
        cell = np.array([receiver.cell for receiver in self.receivers])[receiver]
        nbytes = np.concatenate([group.nbytes for group in groups])
        demand = Demand(receiver, cell, [self._candidates(*end) for end in ends], nbytes)
        parts = divide_trainer(demand, len(self.places), len(self.receivers), len(wires))
        least = self._least(int(demand.nbytes.sum()))
        segments = self._divide(demand, parts, least)
        shares, done = [], 0
        for wire, group in pairs:
            shares.append(self._cut(wire, group, segments[done : done + len(group.lead)], least))
            done += len(group.lead)
        return parts, shares

    def _least(self, total: int) -> int:
        """Return the bytes of the smallest piece that is cut from a part of a tensor, if an update sends `total`
        bytes."""
        return max(1, min(self.limits.message // 4, total // len(self.places) // 100))

    def _divide(self, demand: Demand, parts: TrainerParts, least: int) -> list[list[tuple[int, float]]]:
        """Return the senders of each row of `demand`, as (rank, bytes)."""
        candidates, cell = demand.candidates, demand.cell
        loads = SenderLoads(parts, demand, len(self.receivers))
        count = np.array([len(ranks) for ranks in candidates])
        fixed = count == 1
        only = np.array([ranks[0] for ranks in candidates])
        loads.add(only[fixed], demand.receiver[fixed], cell[fixed], demand.nbytes[fixed])
        sizes, to, where = demand.nbytes.tolist(), demand.receiver.tolist(), cell.tolist()
        divided = [[(rank, float(size))] for rank, size in zip(only.tolist(), sizes, strict=True)]
        grain = float(least * 4)
        for group in np.lexsort((-demand.nbytes, count))[int(fixed.sum()) :].tolist():
            divided[group] = loads.share(candidates[group], to[group], where[group], sizes[group], grain)
        return divided

    def _candidates(self, holders: int, receiver: int) -> Sequence[int]:
        place = self.receivers[receiver].place
        key = (holders, f"{place.machine}/{place.gpu}")
        if key not in self._near:
            self._near[key] = nearest(self.sets[holders], self.places, place)
        return self._near[key]

    def _cut(self, wire: CellWire, group: _Groups, segments: list[list[tuple[int, float]]], least: int) -> CellShares:
        """Return what each trainer rank sends to a cell (servers that share a process group).

        Args:
            group: the groups of boxes that are planned together, with their sizes.
            segments: for each group (rank, bytes) of its senders, who send consecutive bytes of it in this order.
            least: fewest bytes of a share.
        """
        starts = np.cumsum(group.nbytes) - group.nbytes
        ends = [
            start + np.rint(np.cumsum([size for _, size in share])).astype(np.int64)
            for start, share in zip(starts.tolist(), segments, strict=True)
        ]
        sender = np.array([rank for share in segments for rank, _ in share])
        of_group = np.repeat(np.arange(len(segments)), [len(share) for share in segments])
        parts = wire.parts.take(group.order)
        pieces, segment = cut_parts(parts, np.concatenate(ends), least)
        lead = group.lead[of_group[segment]]
        none = np.zeros(len(pieces), np.int64)
        return CellShares(pieces, sender[segment], wire.receiver[lead], wire.kinds[lead], none, none)

    def rounds(self, cell: int, wire: CellWire, shares: CellShares, parts: TrainerParts) -> CellShares:
        """Return the parts that are sent to a cell (servers that share a process group), cut where a round ends, with
        their rounds. They are ordered by phase, then by pair of ranks."""
        shares = replace(shares, phase=parts.phase(shares.sender, cell))
        kinds = int(shares.kind.max()) + 1
        # parts that one rank needs (kind 0) and stripes of kind 1 share rounds; each other kind has rounds of its own
        stage = shares.phase * kinds + np.maximum(shares.kind, 1)
        key = ((stage * kinds + shares.kind) * len(self.places) + shares.sender) * len(self.receivers) + shares.receiver
        order = np.argsort(key, kind="stable")
        shares, stage, key = shares.take(order), stage[order], key[order]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        nbytes = np.add.reduceat(shares.parts.nbytes, first)
        # smaller rounds: a rank's buffer also has to hold the stripes that other ranks of its group received
        widest = max((len(fan) for fan in wire.fans), default=1)
        limits = replace(self.limits, nbytes=max(self.limits.nbytes // widest, 1))
        ends, numbers, start = [], [], 0
        done: dict[int, int] = {}  # number of the next round of each phase
        for chosen in np.split(np.arange(len(first)), np.flatnonzero(np.diff(stage[first])) + 1):
            at = first[chosen]
            phase = int(shares.phase[at[0]])
            number, size = rounds_of(shares.sender[at], shares.receiver[at], nbytes[chosen], limits)
            ends.append(start + np.cumsum(size))
            numbers.append(number + done.get(phase, 0))
            start += int(size.sum())
            done[phase] = int(numbers[-1].max()) + 1
        pieces, message = cut_parts(shares.parts, np.concatenate(ends), self._least(start))
        row = np.searchsorted(np.cumsum(shares.parts.nbytes), np.cumsum(pieces.nbytes) - pieces.nbytes, side="right")
        whole = shares.take(row)
        return replace(whole, parts=pieces, number=np.concatenate(numbers)[message])
