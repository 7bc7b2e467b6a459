"""The plan of an update from shard to shard: which rank sends which box (rectangular part of a tensor) when. Every rank
computes the same plan.

trainer's storages  -> share_boxes -> which ranks hold which box
servers' storages   -> check_tiling, needs_of -> which parts of these boxes each server rank needs
                    -> machines_of, cell_wire -> what is sent: a box that several ranks of a machine need crosses the
                                    network once, in stripes (shares), which these ranks exchange
                    -> ShareScheduler -> who sends each byte, and in which round
                    -> UpdatePlan.program -> what one rank sends or receives
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.sync.shards.assign import receivers_of
from megarl.sync.shards.boxes import GpuPlace, RankStorage, ServerStorage, TensorTable, dtype_codes, row_major
from megarl.sync.shards.cuts import PartTable
from megarl.sync.shards.links import NeedTable, check_tiling, needs_of, share_boxes
from megarl.sync.shards.messages import SentParts, lay_out
from megarl.sync.shards.program import (
    LinkTable,
    TargetTable,
    TransferProgram,
)
from megarl.sync.shards.rounds import RoundLimits
from megarl.sync.shards.schedule import CellShares, ShareScheduler
from megarl.sync.shards.table import Array, digest
from megarl.sync.shards.wire import NeedRows, TrainerHolders, WireTargets, cell_wire, extent_dim, machines_of

_DIRECT = 1 << 20  # least bytes of a box that is sent without buffers; it must be contiguous in both parameters


class UpdatePlan:
    """Everything that an update sends, in compact form.

    Args:
        tensors: the tensors that are sent.
        trainer, places: how each trainer rank stores the model, and where it runs.
        servers: the servers to update.
        limits: limits of the rounds; None: the defaults.

    Attributes:
        receivers: the ranks of all servers.
        parts: the parts of the trainer, which send to the cells (servers that share a process group) in turn.
        receiver_numbers: int64 [M], for each message the index of its receiver in `receivers`.
        rounds, messages, fans: tables of the whole `TransferProgram`; `program` computes the links and targets.

    Raises:
        UserError: a parameter of a server is not covered exactly once, or the trainer does not hold all of it.
    """

    def __init__(
        self,
        tensors: TensorTable,
        trainer: Sequence[RankStorage],
        places: Sequence[GpuPlace],
        servers: Sequence[ServerStorage],
        limits: RoundLimits | None = None,
    ) -> None:
        self.tensors, self.servers, self.places = tensors, servers, places
        limits = limits or RoundLimits()
        self.shared = share_boxes(trainer)
        self.needs = self._read_needs()
        machines = machines_of(servers, self.needs, TrainerHolders(self.shared.sets, places))
        gathering = {name for name, machine in machines.items() if machine.gathers}
        self.receivers = receivers_of(servers, len(trainer), limits.cells, gathering)
        cells = 1 + max(receiver.cell for receiver in self.receivers)
        members: list[list[int]] = [[] for _ in range(cells)]
        for number, receiver in enumerate(self.receivers):
            members[receiver.cell].append(number)
        self.wires = [cell_wire(cell, self.receivers, self.needs, machines) for cell in members]
        scheduler = ShareScheduler(self.receivers, places, self.shared.sets, self.needs, limits)
        self.parts, shares = scheduler.shares(self.wires)
        planned = [
            scheduler.rounds(cell, wire, share, self.parts)
            for cell, (wire, share) in enumerate(zip(self.wires, shares, strict=True))
        ]
        self._join(planned)

    def _read_needs(self) -> NeedRows:
        """Check how all server ranks store the model, and return which parts of the trainer's boxes they need."""
        tables: list[NeedTable] = []
        span: dict[int, tuple[int, int]] = {}
        rows = 0
        storages = [
            (f"server {number}, rank {rank}", storage)
            for number, server in enumerate(self.servers)
            for rank, storage in enumerate(server.ranks)
        ]
        for where, storage in storages:
            if id(storage) not in span:
                check_tiling(storage, where)
                tables.append(needs_of(storage, self.shared, self.tensors, where))
                span[id(storage)] = rows, rows + len(tables[-1])
                rows += len(tables[-1])
        spans = [span[id(storage)] for _, storage in storages]
        first, last = zip(*spans, strict=True)
        return NeedRows(NeedTable.joined(tables), first, last, self.shared.holders)

    def _join(self, planned: Sequence[CellShares]) -> None:
        """Set the tables of the whole update from what is sent to each cell (servers that share a process group)."""
        boxes, groups = (
            np.cumsum([0, *(len(part) for part in parts)]).tolist()
            for parts in ([wire.boxes for wire in self.wires], [wire.fans for wire in self.wires])
        )
        self._box_need = np.concatenate([wire.boxes.need for wire in self.wires])
        self._targets = WireTargets.joined(
            [wire.targets.replace(box=wire.targets.box + start) for wire, start in zip(self.wires, boxes, strict=False)]
        )
        cell = np.repeat(np.arange(len(planned)), [len(shares.parts) for shares in planned])
        fans = [wire.boxes.fan[shares.parts.row] for wire, shares in zip(self.wires, planned, strict=True)]
        fan = np.concatenate([np.where(rows >= 0, rows + start, -1) for rows, start in zip(fans, groups, strict=False)])
        parts = PartTable.joined(
            [shares.parts.replace(row=shares.parts.row + start) for shares, start in zip(planned, boxes, strict=False)]
        )
        phase, number, sender, receiver = (
            np.concatenate([getattr(shares, name) for shares in planned])
            for name in ("phase", "number", "sender", "receiver")
        )
        proxies = {place: rank for rank, place in enumerate(self.places)}
        proxy = np.array([proxies.get(receiver.place, -1) for receiver in self.receivers])[receiver]
        # The parameters of a server rank on a trainer rank's GPU belong to another process, so it copies from buffers.
        direct = (fan < 0) & (proxy < 0) & self._are_direct(parts, sender)
        sent = SentParts(cell, phase, number, sender, receiver, fan, parts.nbytes, direct, proxy == sender)
        messages = lay_out(sent, self.receivers, [group for wire in self.wires for group in wire.fans])
        self.rounds, self.messages, self.fans = messages.rounds, messages.table, messages.fans
        self._parts, self._message = parts.take(messages.order), messages.message.astype(np.int32)
        self._start, self.receiver_numbers = messages.start, messages.receiver

    def _corners(self, parts: PartTable) -> tuple[Array, Array]:
        """Return the first index (lo) and the end (hi) of each part in its tensor: int64 [n, DIMS] each."""
        table, need = self.needs.table, self._box_need[parts.row]
        lo, hi = table.lo[need].copy(), table.hi[need].copy()
        dim, row = extent_dim(hi - lo), np.arange(len(lo))
        start = lo[row, dim]
        lo[row, dim], hi[row, dim] = start + parts.first, start + parts.last
        return lo, hi

    def _are_direct(self, parts: PartTable, sender: Array) -> Array:
        """Return whether each part can be sent without buffers: bool [n]. Such a part is large, is contiguous in the
        parameters of both ranks, and has the same dtype there and on the wire."""
        large = np.flatnonzero(parts.nbytes >= _DIRECT)
        chosen = parts.take(large)
        lo, hi = self._corners(chosen)
        table, need = self.needs.table, self._box_need[chosen.row]
        views = self.shared.views(table.box[need], sender[large], lo)
        steps, wire = row_major(hi - lo), dtype_codes(self.tensors.dtypes)[table.tensor[need]]
        same = ((hi - lo == 1) | ((views.strides == steps) & (table.strides[need] == steps))).all(1)
        same &= (views.dtype == wire) & (table.dtype[need] == wire)
        direct = np.zeros(len(parts), bool)
        direct[large] = same
        return direct

    def program(self, *, sender: int | None = None, receiver: tuple[int, int] | None = None) -> TransferProgram:
        """Return the transfers of trainer rank `sender`, or of `receiver` (server, rank); without both, all transfers.

        The whole program of a large model has hundreds of megabytes.
        """
        keep = np.ones(len(self._parts), bool)
        targets = None
        if sender is not None:
            keep = self.messages.sender[self._message] == sender
        elif receiver is not None:
            number = next(i for i, r in enumerate(self.receivers) if (r.server, r.rank) == receiver)
            targets = self._targets.receiver == number
            keep = np.isin(self._parts.row, self._targets.box[targets]) | (
                self.receiver_numbers[self._message] == number
            )
        chosen = np.flatnonzero(keep)
        links = self._links(chosen)
        rows, part = self._targets_of(chosen, targets)
        whole = TransferProgram(self.rounds, self.messages, links, self._unpacked(chosen, rows, part), self.fans)
        if sender is not None:
            return whole.of_sender(sender)
        return whole if receiver is None else whole.of_receiver(*receiver)

    def _links(self, chosen: Array) -> LinkTable:
        parts, message = self._parts.take(chosen), self._message[chosen]
        lo, hi = self._corners(parts)
        table, need = self.needs.table, self._box_need[parts.row]
        views = self.shared.views(table.box[need], self.messages.sender[message], lo)
        place = (views.parameter, views.offset, views.strides)
        return LinkTable(message, self._start[chosen], parts.nbytes, table.tensor[need], lo, hi, *place)

    def _targets_of(self, chosen: Array, keep: Array | None) -> tuple[Array, Array]:
        """Return the rows of the targets (ranks that store a box) of the chosen parts, and the index in `chosen` of
        each target's part; `keep`: bool, the targets to look at, None: all."""
        rows = np.arange(len(self._targets)) if keep is None else np.flatnonzero(keep)
        box, wanted = self._targets.box[rows], self._parts.row[chosen]
        first, last = np.searchsorted(box, wanted), np.searchsorted(box, wanted, side="right")
        count = last - first
        part = np.repeat(np.arange(len(chosen)), count)
        return rows[np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count) + first[part]], part

    def _unpacked(self, chosen: Array, rows: Array, part: Array) -> TargetTable:
        """Return where each of the targets `rows` stores its part, which has the index `part` in `chosen`."""
        table, need = self.needs.table, self._targets.need[rows]
        dim = extent_dim(table.hi[need] - table.lo[need])
        step = table.strides[need, dim]
        offset = table.offset[need] + self._parts.first[chosen][part] * step
        who = [(receiver.server, receiver.rank) for receiver in self.receivers]
        server, rank = np.array(who, np.int64)[self._targets.receiver[rows]].T
        return TargetTable(part, server, rank, table.parameter[need], offset, table.strides[need])

    def gathering_ranks(self) -> dict[str, list[tuple[int, int]]]:
        """Return the ranks (server, rank) that exchange stripes (shares of what several ranks of a machine need), by
        the name of their machine."""
        members = set(zip(self.fans.server.tolist(), self.fans.rank.tolist(), strict=True))
        machines: dict[str, list[tuple[int, int]]] = {}
        for receiver in self.receivers:
            if (receiver.server, receiver.rank) in members:
                machines.setdefault(receiver.place.machine, []).append((receiver.server, receiver.rank))
        return machines

    def distances(self) -> Array:
        """Return how far each message goes: int64 [M], 0 on one GPU, 1 inside a machine, 2 over the network."""
        places = [*self.places, *(receiver.place for receiver in self.receivers)]
        machines = {name: number for number, name in enumerate(dict.fromkeys(place.machine for place in places))}
        table = np.array([(machines[place.machine], place.gpu) for place in places])
        near = table[self.messages.sender] == table[len(self.places) + self.receiver_numbers]
        return np.where(near[:, 0], np.where(near[:, 1], 0, 1), 2)

    @property
    def digest(self) -> str:
        """Hash of everything that the plan sends, equal on all ranks that planned the same update."""
        arrays = self.rounds.arrays("rounds") | self.messages.arrays("messages") | self.fans.arrays("fans")
        parts = self._parts.arrays("parts") | {"start": self._start, "message": self._message}
        return digest(arrays | parts | self.needs.table.arrays("needs") | self.tensors.arrays("tensors"))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the plan's tables in memory."""
        tables = (self.rounds, self.messages, self.fans, self._parts, self._targets, self.needs.table)
        wires = sum(wire.boxes.memory_bytes + wire.targets.memory_bytes for wire in self.wires)
        return sum(table.memory_bytes for table in tables) + self._message.nbytes + self._start.nbytes + wires
