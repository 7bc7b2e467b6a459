"""Which trainer rank sends what: cells of servers, parts of the trainer, and shares of ranks that hold the same box.

With C cells the trainer's ranks form C parts. In phase k, part (c + k) mod C sends to cell c: a Latin square, so that
every receiver receives and every sender sends in each phase. Cells that share no sender, such as servers that use the
trainer's GPUs, do not take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.sync.shards.boxes import GpuPlace, ServerStorage
from megarl.sync.shards.table import Array


@dataclass(frozen=True)
class ReceivingRank:
    """A rank of a server, and the cell that its server belongs to."""

    server: int
    rank: int
    cell: int
    place: GpuPlace


@dataclass(frozen=True, eq=False)
class Demand:
    """Bytes that one receiver needs of boxes that the same ranks may send.

    Attributes:
        receiver, cell: int64 [G], number of the receiver, and its cell.
        candidates: the ranks that may send to it, of each row.
        nbytes: int64 [G].
    """

    receiver: Array
    cell: Array
    candidates: Sequence[Sequence[int]]
    nbytes: Array


@dataclass(frozen=True, eq=False)
class TrainerParts:
    """The parts of the trainer that serve cells in turn. Cells that share no sender have parts of their own.

    Attributes:
        part: int64 [N], part of each trainer rank.
        index: int64 [cells], number of each cell among those that the same ranks serve.
        ways: int64 [cells], number of these cells, of their parts and of their phases.
        senders: int64 [cells], number of ranks that serve these cells.
    """

    part: Array
    index: Array
    ways: Array
    senders: Array

    def phase(self, sender: Array, cell: int) -> Array:
        """Return the phase in which each sender serves a cell."""
        return (self.part[sender] - self.index[cell]) % self.ways[cell]


def receivers_of(servers: Sequence[ServerStorage], senders: int, most: int) -> list[ReceivingRank]:
    """Return the ranks of all servers, with cells: servers that share a machine share a cell, and there are at most
    `most` cells and no more than `senders`."""
    cell_of = list(range(len(servers)))
    first_on: dict[str, int] = {}
    for number, server in enumerate(servers):
        for place in server.places:
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
    """Divide the trainer's ranks into parts with equal numbers of ranks.

    Ranks that send to the same receivers go to different parts, so that each part can give every receiver the same
    share. Ranks that hold the same box count as if each sent an equal share of it.
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
    """Return the cells in groups that share no sender; `serves`: bool [senders, cells]."""
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
    """Return a part for each rank: int64 [N]; `expected`: bytes from each rank to each receiver, float64 [N, D]."""
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
    """Divides what several ranks hold among them, so that senders and receivers are busy equally in every phase.

    Args:
        parts: parts of the trainer.
        demand: everything that is sent.
        receivers: number of receivers.

    Attributes:
        out: bytes from each sender to each cell: float64 [senders, cells].
        into: bytes to each receiver from each part: float64 [receivers, parts].
    """

    def __init__(self, parts: TrainerParts, demand: Demand, receivers: int) -> None:
        cells = len(parts.index)
        self.part = parts.part.tolist()
        self.out = np.zeros((len(parts.part), cells))
        self.into = np.zeros((receivers, cells))
        # what fills a sender's phase, and a receiver's phase, counts as 1
        total = np.bincount(demand.cell, demand.nbytes, cells)
        # the fullest sender bounds the whole update, a receiver that is full in one phase only this phase
        self._per_out = (2 * parts.senders / np.maximum(total, 1)).tolist()
        needed = np.bincount(demand.receiver, demand.nbytes, receivers)
        ways = np.ones(receivers)
        ways[demand.receiver] = parts.ways[demand.cell]
        self._per_in = (ways / np.maximum(needed, 1)).tolist()

    def add(self, sender: Array, receiver: Array, cell: Array, nbytes: Array) -> None:
        """Add what only one rank holds: rows of (sender, receiver, the receiver's cell, bytes)."""
        np.add.at(self.out, (sender, cell), nbytes)
        np.add.at(self.into, (receiver, np.array(self.part)[sender]), nbytes)

    def share(
        self, holders: Sequence[int], receiver: int, cell: int, nbytes: int, grain: float
    ) -> list[tuple[int, float]]:
        """Return how many bytes each of some `holders` sends to a receiver, by rank; none sends much less than `grain`
        if there are several."""
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
    """Divide `amount` so that the largest `level + slope * share` is least, into at most amount / grain shares."""
    order = sorted(range(len(levels)), key=lambda i: (levels[i], i))[: max(1, int(amount // max(grain, 1.0)))]
    used, height = 0, 0.0
    weight = offset = 0.0  # sum of 1 / slope, and of level / slope
    for used, i in enumerate(order, 1):
        weight += 1 / slopes[i]
        offset += levels[i] / slopes[i]
        height = (amount + offset) / weight
        if used == len(order) or height <= levels[order[used]]:
            break
    return [(i, (height - levels[i]) / slopes[i]) for i in order[:used]]


def nearest(holders: Sequence[int], places: Sequence[GpuPlace], receiver: GpuPlace) -> Sequence[int]:
    """Return which of the ranks that hold a box may send it: those on the receiver's GPU, else those on its machine,
    else all."""
    here = [rank for rank in holders if places[rank].machine == receiver.machine]
    return [rank for rank in here if places[rank].gpu == receiver.gpu] or here or holders
