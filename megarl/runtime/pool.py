"""Groups of samples in one order that all replicas agree on, dealt out again to all of them.

Replica r of d draws prompts r, r + d, r + 2 d, ... of every batch and keeps some of their groups, so the replicas end
up with different numbers. Which groups make up the step must not depend on d, and every replica should train on equally
many: all replicas learn which groups were kept, take the first ones in the order of the data, and hand group k of those
to replica k modulo d. A group may have any number of samples; replicas get equally many groups, not samples.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from megarl.data.batch import Batch
from megarl.data.groups import group_places

if TYPE_CHECKING:
    from megarl.comm import WorkerGroup


class GroupPool:
    """Collects this replica's groups of samples. All methods are collective over the replicas.

    Args:
        group: one rank of every replica, in the order of the replicas.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group, self._rank, self._size = group, group.rank, group.size
        self._mine: list[Batch] = []
        self._owners: list[int] = []
        self._counts: list[int] = []

    def __len__(self) -> int:
        """Groups on all replicas."""
        return len(self._owners)

    def add(self, samples: Batch, keep: list[bool]) -> None:
        """Take the groups that `keep` marks, one entry for each, of this replica's share of what all drew together."""
        groups = [group if kept else [] for group, kept in zip(group_places(samples["uid"]), keep, strict=True)]
        self._mine.append(samples.select([place for group in groups for place in group]))
        shares: list[list[int]] = self._group.all_gather_json(list(map(len, groups)))
        for place in range(max(map(len, shares))):
            for replica, share in enumerate(shares):
                if place < len(share) and share[place]:
                    self._owners.append(replica)
                    self._counts.append(share[place])

    def deal(self, wanted: int) -> tuple[Batch, Batch]:
        """This replica's share of the first `wanted` groups, and of the rest; the samples of a group stand together."""
        taker = [(k if k < wanted else k - wanted) % self._size for k in range(len(self))]
        mine = Batch.concat(self._mine)
        held = [k for k, owner in enumerate(self._owners) if owner == self._rank]
        ordered = [k for k, to in enumerate(taker) if to == self._rank]
        if self._size > 1:
            parts = [mine.select(self._places(held, [k for k in held if taker[k] == r])) for r in range(self._size)]
            mine = Batch.concat(
                [Batch.from_bytes(x) for x in self._group.all_to_all_bytes([p.to_bytes() for p in parts])]
            )
            held = sorted(ordered, key=lambda k: self._owners[k])  # what arrived stands in the order of its senders
        return (
            mine.select(self._places(held, [k for k in ordered if k < wanted])),
            mine.select(self._places(held, [k for k in ordered if k >= wanted])),
        )

    def _places(self, held: list[int], groups: list[int]) -> list[int]:
        """Where the samples of `groups` are in a batch of the groups `held`, one after the other."""
        ends = dict(zip(held, accumulate(self._counts[k] for k in held), strict=True))
        return [place for k in groups for place in range(ends[k] - self._counts[k], ends[k])]
