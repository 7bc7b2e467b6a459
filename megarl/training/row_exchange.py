"""Replicas exchange rows before a pass, so that all of them compute on about as many tokens.

    replica 0   rows 0 1 2 3 (90 tokens)  --.           .-->  rows 0 2 3      (62 tokens)  --.           .--> results
                                             >  send   <                                      > restore <
    replica 1   rows 4 5 6 7 (35 tokens)  --'           '-->  rows 4 5 6 7 1  (63 tokens)  --'           '--> results

After the advantages every token has its weight in the loss, so it does not matter which replica computes a row: loss
and gradients are the same sums in another order. Rows that are computed together (the two samples of a pair, samples
that share a prompt or images) move together. Every rank of a replica has all its rows, so rank i of one replica sends
to rank i of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.data.balance import rebalance
from megarl.data.batch import Batch, Jagged
from megarl.system.comm import WorkerGroup

# No rows are exchanged while the replica with the most tokens has at most this many times the mean.
_EVEN = 1.02


@dataclass(frozen=True)
class RowExchange:
    """Which rows this data-parallel replica keeps, sends and receives, so that all replicas have about equally many
    tokens.

    Attributes:
        group: the group of the exchange, with one rank of every replica.
        staying: positions of the rows that stay here, ascending.
        leaving: for each replica, the positions of the rows that this replica sends to it.
        coming: for each replica, the number of rows that this replica receives from it.
        before, after: ratio of the fullest replica's tokens to the mean, without and with the exchange.
    """

    group: WorkerGroup
    staying: list[int]
    leaving: list[list[int]]
    coming: list[int]
    before: float
    after: float

    @classmethod
    def of(cls, units: Sequence[Sequence[int]], tokens: Sequence[int], group: WorkerGroup) -> RowExchange:
        """Plan the exchange. Collective over the replicas.

        Args:
            units: sets of this replica's rows that must stay together, as positions; every row is in one set.
            tokens: number of tokens of each set.
        """
        local = np.array([list(tokens), list(map(len, units))], dtype=np.int64)
        shares = [
            np.frombuffer(share, dtype=np.int64).reshape(2, -1) for share in group.all_gather_bytes(local.tobytes())
        ]
        sizes, rows = np.concatenate(shares, axis=1)
        owners = np.repeat(np.arange(group.size), [share.shape[1] for share in shares])
        before = _fullest(sizes, owners, group.size)
        takers = owners if before <= _EVEN else rebalance(sizes, owners, group.size)
        after = _fullest(sizes, takers, group.size)
        if after >= before:
            takers = owners
        shares_here = takers[owners == group.rank]
        leaving = [
            [row for unit in np.flatnonzero(shares_here == rank).tolist() for row in units[unit]]
            for rank in range(group.size)
        ]
        staying, leaving[group.rank] = sorted(leaving[group.rank]), []
        arriving = (takers == group.rank) & (owners != group.rank)
        coming = np.bincount(owners[arriving], weights=rows[arriving], minlength=group.size).astype(int).tolist()
        return cls(group, staying, leaving, coming, before, min(before, after))

    @property
    def moves(self) -> bool:
        """Whether any replica sends rows; equal on all replicas."""
        return self.after < self.before

    def send(self, batch: Batch) -> Batch:
        """Exchange rows, and return the rows that this replica computes: its rows that stay, then the received rows in
        the order of the sending replicas. Collective.

        Raises:
            ValueError: a column has values that cannot be sent.
        """
        if not self.moves:
            return batch
        return batch.alike(Batch.concat([batch.select(self.staying), *self._swap(batch, self.leaving)]))

    def restore(self, outputs: Jagged) -> Jagged:
        """Send the outputs of received rows back. Collective.

        Args:
            outputs: outputs of the rows that `send` returned.

        Returns:
            The outputs of this replica's own rows, in the order before the exchange.
        """
        if not self.moves:
            return outputs
        computed = Batch({"outputs": outputs})
        ends = np.cumsum([len(self.staying), *self.coming]).tolist()
        parts = [list(range(end - count, end)) for end, count in zip(ends[1:], self.coming, strict=True)]
        joined = Batch.concat([computed.select(range(len(self.staying))), *self._swap(computed, parts)])
        order = [*self.staying, *(row for rows in self.leaving for row in rows)]
        restored: Jagged = joined.select(np.argsort(order, kind="stable").tolist())["outputs"]
        return restored

    def _swap(self, batch: Batch, parts: Sequence[Sequence[int]]) -> list[Batch]:
        """Send the rows `parts[i]` to replica i, and return the batch from each replica that sends rows to this one."""
        spans = batch.to_blocks([rows for rows in parts if rows])
        blocks = [next(spans).block.tobytes() if rows else b"" for rows in parts]
        where = next((value.device for value in batch.fields.values()), torch.device("cpu"))
        return [Batch.from_bytes(data).to(where) for data in self.group.all_to_all_bytes(blocks) if data]


def _fullest(sizes: np.ndarray, owners: np.ndarray, parts: int) -> float:
    """Return the ratio of the largest total of `sizes` in a part to the mean total; 1 if all sizes are 0."""
    totals = np.bincount(owners, weights=sizes, minlength=parts)
    return float(totals.max() * parts / max(totals.sum(), 1)) if totals.sum() else 1.0
