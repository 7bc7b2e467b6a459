"""Groups of samples in one order that all replicas agree on, dealt out again to all of them.

Replica r of d draws prompts r, r + d, r + 2 d, ... of every batch and keeps some of their groups, so the replicas end
up with different numbers. Which groups make up the step must not depend on d, and every replica should train on equally
many: all replicas learn which groups were kept, take the first ones in the order of the data, and hand group k of those
to replica k modulo d.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.data.batch import Batch

if TYPE_CHECKING:
    from megarl.comm import WorkerGroup


class GroupPool:
    """Collects this replica's groups, `n` samples in a row each. All methods are collective over the replicas.

    Args:
        n: samples per group.
        group: one rank of every replica, in the order of the replicas.
    """

    def __init__(self, n: int, group: WorkerGroup) -> None:
        self._n, self._group, self._rank, self._size = n, group, group.rank, group.size
        self._mine: list[Batch] = []
        self._owners: list[int] = []

    def __len__(self) -> int:
        """Groups on all replicas."""
        return len(self._owners)

    def add(self, samples: Batch, keep: list[bool]) -> None:
        """Take the groups that `keep` marks, out of this replica's share of what all replicas drew together."""
        self._mine.append(
            samples.select([g * self._n + i for g, kept in enumerate(keep) if kept for i in range(self._n)])
        )
        shares: list[list[bool]] = self._group.all_gather_json(keep)
        for place in range(max(map(len, shares))):
            self._owners += [r for r, share in enumerate(shares) if place < len(share) and share[place]]

    def deal(self, wanted: int) -> tuple[Batch, Batch]:
        """This replica's share of the first `wanted` groups, and of the rest."""
        taker = [(k if k < wanted else k - wanted) % self._size for k in range(len(self))]
        mine = Batch.concat(self._mine)
        held = [taker[k] for k, owner in enumerate(self._owners) if owner == self._rank]
        if self._size > 1:
            parts = [mine.select(self._places([g for g, to in enumerate(held) if to == r])) for r in range(self._size)]
            mine = Batch.concat(
                [Batch.from_bytes(x) for x in self._group.all_to_all_bytes([p.to_bytes() for p in parts])]
            )
        # What arrived is sorted by the replica it came from; put it back into the common order.
        ordered = [k for k, to in enumerate(taker) if to == self._rank]
        arrived = sorted(ordered, key=lambda k: self._owners[k])
        place = {k: position for position, k in enumerate(arrived)}
        return (
            mine.select(self._places([place[k] for k in ordered if k < wanted])),
            mine.select(self._places([place[k] for k in ordered if k >= wanted])),
        )

    def _places(self, groups: list[int]) -> list[int]:
        return [g * self._n + i for g in groups for i in range(self._n)]
