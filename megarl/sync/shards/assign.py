"""Chooses which trainer rank sends which bytes to which server rank.

A cell is a set of servers that share one process group with the trainer ranks that send to them. With C cells the
trainer's ranks are divided into C parts, and an update has C phases. In phase k, part (c + k) mod C sends to cell c: a
Latin square, so that every receiver receives and every sender sends in each phase. Cells without a common sender, such
as servers that use the trainer's GPUs, do not take turns. If several ranks hold the same box (a rectangular part of a
tensor), each may send a share of it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.sync.shards.boxes import GpuPlace, ServerStorage
from megarl.sync.shards.table import Array


@dataclass(frozen=True)
class ReceivingRank:
    """A rank of a server, and the number of the server's cell (servers that share one process group)."""

    server: int
    rank: int
    cell: int
    place: GpuPlace


@dataclass(frozen=True, eq=False)
class Demand:
    """The bytes that have to be sent: in each row, those that one server rank needs from one set of trainer ranks.

    Attributes:
        receiver, cell: int64 [G], number of the server rank, and of its cell (servers that share a process group).
        candidates: for each row the trainer ranks, each of which may send any of these bytes.
        nbytes: int64 [G], bytes.
    """

    receiver: Array
    cell: Array
    candidates: Sequence[Sequence[int]]
    nbytes: Array


@dataclass(frozen=True, eq=False)
class TrainerParts:
    """Division of the trainer's ranks into parts, which send to the cells (servers that share a process group) in turn.

    Cells that receive from the same trainer ranks take turns: with `ways` such cells, these ranks form `ways` parts,
    and the update has `ways` phases.

    Attributes:
        part: int64 [N], part of each trainer rank.
        index: int64 [cells], number of each cell among the cells with which it takes turns.
        ways: int64 [cells], number of cells that take turns with each cell, including itself.
        senders: int64 [cells], number of trainer ranks that send to the cells that take turns with each cell.
    """

    part: Array
    index: Array
    ways: Array
    senders: Array

    def phase(self, sender: Array, cell: int) -> Array:
        """Return the phase of the update in which each trainer rank in `sender` sends to `cell` (the number of a set of
        servers that share a process group)."""
        return (self.part[sender] - self.index[cell]) % self.ways[cell]


def receivers_of(
    servers: Sequence[ServerStorage], senders: int, most: int, gathering: Container[str]
) -> list[ReceivingRank]:
    """Return the ranks of all servers, each with its cell (servers that share a process group).

    Servers on a machine in `gathering`, whose ranks exchange stripes (shares of what several of them need), share a
    cell. There are at most `most` cells, and at most one for each of the trainer's ranks, of which there are `senders`.
    """
    cell_of = list(range(len(servers)))
    first_on: dict[str, int] = {}
    for number, server in enumerate(servers):
        for place in server.places:
            if place.machine not in gathering:
                continue
            other = cell_of[first_on.setdefault(place.machine, number)]
            if other != cell_of[number]:
                joined = cell_of[number]
                cell_of = [other if cell == joined else cell for cell in cell_of]
    cells = sorted(set(cell_of))
    count = min(len(cells), most, senders)
    number_of = {cell: place * count // len(cells) for place, cell in enumerate(cells)}
    return [
        ReceivingRank(number, rank, number_of[cell_of[number]], place)
        for number, server in enumerate(servers)
        for rank, place in enumerate(server.places)
    ]


def divide_trainer(demand: Demand, senders: int, receivers: int, cells: int) -> TrainerParts:
    """Divide the trainer's ranks into parts with equal numbers of ranks; the cells receive from the parts in turn.

    Ranks that send to the same receivers go to different parts, so that every receiver gets about as many bytes from
    each part. If several ranks may send the same bytes, each counts as the sender of an equal share.

    Args:
        senders, receivers, cells: numbers of trainer ranks, server ranks, and cells (servers that share a process
            group).
    """
    count = np.array([len(ranks) for ranks in demand.candidates])
    members = np.concatenate([np.array(ranks) for ranks in demand.candidates])
    expected = np.zeros((senders, receivers))
    np.add.at(expected, (members, np.repeat(demand.receiver, count)), np.repeat(demand.nbytes / count, count))
    serves = np.zeros((senders, cells), bool)
    serves[members, np.repeat(demand.cell, count)] = True
    part, index, ways, sizes = (np.zeros(length, np.int64) for length in (senders, cells, cells, cells))
    for group in _linked(serves):
        ranks = np.flatnonzero(serves[:, group].any(1))
        index[group], ways[group], sizes[group] = np.arange(len(group)), len(group), len(ranks)
        part[ranks] = _spread(expected[ranks], len(group))
    return TrainerParts(part, index, ways, sizes)


def _linked(serves: Array) -> list[list[int]]:
    """Group the cells (servers that share a process group) such that cells in different groups have no common sender.

    Args:
        serves: bool [senders, cells], whether each rank may send to each cell.
    """
    groups: list[tuple[Array, list[int]]] = []
    for cell in range(serves.shape[1]):
        ranks, cells = serves[:, cell], [cell]
        apart = []
        for others, group in groups:
            if (others & ranks).any():
                ranks, cells = ranks | others, group + cells
            else:
                apart.append((others, group))
        groups = [*apart, (ranks, cells)]
    return [sorted(group) for _, group in groups]


def _spread(expected: Array, parts: int) -> Array:
    """Return a part (0 .. parts - 1) for each rank, different ones for ranks with the same receivers: int64 [N].

    Args:
        expected: bytes from each rank to each receiver, float64 [N, D].
    """
    senders, receivers = expected.shape
    part, load, count = np.zeros(senders, np.int64), np.zeros((parts, receivers)), np.zeros(parts, np.int64)
    room = -(-senders // parts)
    for rank in np.argsort(-expected.sum(1), kind="stable").tolist():
        meets = load @ expected[rank]
        free = np.flatnonzero(count < room)
        chosen = free[np.lexsort((load[free].sum(1), count[free], np.round(meets[free])))[0]]
        part[rank] = chosen
        load[chosen] += expected[rank]
        count[chosen] += 1
    return part


class SenderLoads:
    """Divides bytes that several trainer ranks may send among these ranks, so that all senders and all receivers are
    equally busy in every phase.

    Args:
        parts: parts of the trainer, which send to the cells (servers that share a process group) in turn.
        demand: everything that is sent.
        receivers: number of server ranks.

    Attributes:
        out: bytes from each sender to each cell: float64 [senders, cells].
        into: bytes to each receiver from each part: float64 [receivers, parts].
    """

    def __init__(self, parts: TrainerParts, demand: Demand, receivers: int) -> None:
        cells = len(parts.index)
        self.part = parts.part.tolist()
        self.out = np.zeros((len(parts.part), cells))
        self.into = np.zeros((receivers, cells))
        # loads are relative: a sender's to an equal share of the cell's bytes, a receiver's to its mean bytes per phase
        total = np.bincount(demand.cell, demand.nbytes, cells)
        # senders count twice: the busiest sender delays the whole update, the busiest receiver only its phase
        self._per_out = (2 * parts.senders / np.maximum(total, 1)).tolist()
        needed = np.bincount(demand.receiver, demand.nbytes, receivers)
        ways = np.ones(receivers)
        ways[demand.receiver] = parts.ways[demand.cell]
        self._per_in = (ways / np.maximum(needed, 1)).tolist()

    def add(self, sender: Array, receiver: Array, cell: Array, nbytes: Array) -> None:
        """Count bytes that only one rank can send; row i of the arrays [n] is one transfer."""
        np.add.at(self.out, (sender, cell), nbytes)
        np.add.at(self.into, (receiver, np.array(self.part)[sender]), nbytes)

    def share(
        self, holders: Sequence[int], receiver: int, cell: int, nbytes: int, grain: float
    ) -> list[tuple[int, float]]:
        """Divide `nbytes` for one receiver among the ranks `holders`; return (rank, bytes) of each chosen sender.

        If there are several senders, none sends much less than `grain` bytes.
        """
        out, into = self.out[:, cell], self.into[receiver]
        per_out, per_in = self._per_out[cell], self._per_in[receiver]
        by_part: dict[int, list[int]] = {}
        for rank in holders:
            by_part.setdefault(self.part[rank], []).append(rank)
        parts = list(by_part)
        loads = [[float(out[rank]) for rank in by_part[part]] for part in parts]
        levels = [float(into[p]) * per_in + min(load) * per_out for p, load in zip(parts, loads, strict=True)]
        slopes = [per_in + per_out / len(by_part[part]) for part in parts]
        shares = []
        for number, amount in _filled(levels, slopes, nbytes, grain):
            ranks, load = by_part[parts[number]], loads[number]
            into[parts[number]] += amount
            for place, sent in _filled(load, [1.0] * len(load), amount, grain):
                out[ranks[place]] += sent
                shares.append((ranks[place], sent))
        return sorted(shares)


def _filled(levels: list[float], slopes: list[float], amount: float, grain: float) -> list[tuple[int, float]]:
    """Divide `amount` into at most amount / grain shares such that the largest `level + slope * share` is as small as
    possible; return (index in `levels`, share) of each."""
    order = sorted(range(len(levels)), key=lambda i: (levels[i], i))[: max(1, int(amount // max(grain, 1.0)))]
    used, height = 0, 0.0
    weight = offset = 0.0  # sums over the used indices: of 1 / slope, and of level / slope
    for used, i in enumerate(order, 1):
        weight += 1 / slopes[i]
        offset += levels[i] / slopes[i]
        height = (amount + offset) / weight
        if used == len(order) or height <= levels[order[used]]:
            break
    return [(i, (height - levels[i]) / slopes[i]) for i in order[:used]]


def nearest(holders: Sequence[int], places: Sequence[GpuPlace], receiver: GpuPlace) -> Sequence[int]:
    """Return which of the ranks `holders` may send a box (a part of a tensor) that all of them hold: the ranks on the
    receiver's GPU; if there are none, the ranks on the receiver's machine; else all."""
    here = [rank for rank in holders if places[rank].machine == receiver.machine]
    return [rank for rank in here if places[rank].gpu == receiver.gpu] or here or holders
