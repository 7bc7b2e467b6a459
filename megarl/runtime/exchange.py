"""Replicas of a team exchange whole groups before training on them, so that all train on about as many tokens.

    replica 0   rollout: groups 0 2 4 6   --.              .-->  groups 0 3 4 7   log-probs, updates
                                             >  exchange  <
    replica 1   rollout: groups 1 3 5 7   --'              '-->  groups 1 2 5 6

The exchange follows the last node that produces the samples of an update: `rollout`, or a node after it that resamples.
Dynamic sampling collects groups from all replicas anyway, and shares them by tokens itself. In a team that receives its
samples from another team the buffer shares them.

Dynamic sampling collects groups in a `GroupPool`, in one order that all replicas agree on. Replica r of d generates
prompts r, r + d, r + 2 d, ... of every batch, and keeps some of their groups. Which groups make up the step must not
depend on d, and every replica should train on equally many: the list of kept groups is gathered on all replicas, and
the first ones in the order of the data are taken. Group k of these goes to replica k modulo d or, shared by tokens, to
the replica that `share_groups` chooses. A group may have any number of samples; replicas get equally many groups, not
samples.

Numbers of samples and tokens are gathered on all replicas. Samples go only from the replica that has them to the one
that gets them; every rank of a replica has all its samples, so rank i of one replica sends to rank i of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from megarl.dag.stage import Kind
from megarl.data.balance import max_over_mean, share_groups
from megarl.data.batch import Batch
from megarl.data.groups import ORDINAL, group_places, tokens_of
from megarl.system.errors import ConfigError
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from megarl.dag.graph import TaskGraph
    from megarl.dag.node import Node
    from megarl.runtime.context import StepContext
    from megarl.system.comm import WorkerGroup


class TokenExchange:
    """Redistributes the samples that a node produced among the replicas of a team.

    Attributes:
        makers: names of the nodes after which samples are exchanged.
    """

    def __init__(self, graph: TaskGraph, nodes: Sequence[str]) -> None:
        trained = {graph.inputs(id).samples for id in nodes if graph[id].kind is Kind.MODEL_TRAIN}
        # Dynamic sampling runs these nodes repeatedly until it has enough groups, and then divides the groups among
        # the replicas itself, so nothing is exchanged after these nodes.
        repeated = {id for node in graph if node.declared.refills for id in graph.upstream(node.id)}
        self.makers = frozenset(id for id in nodes if id in trained - repeated)

    def share(self, context: StepContext, node: Node, batch: Batch) -> Batch:
        """Return this replica's samples after the exchange; after other nodes return `batch` unchanged.

        Raises:
            ConfigError: a column cannot be sent.
        """
        if node.id not in self.makers or ORDINAL in batch or context.layout.dp_size == 1:
            return batch
        with phase("exchange"):
            pool = pool_of(context)
            pool.add(batch, [True] * len(group_places(batch["uid"])))
            try:
                return pool.split(len(pool))[0]
            except ValueError as error:
                raise ConfigError(
                    f"samples of node {node.id!r} cannot be sent to other replicas: {error}",
                    where="placement.share",
                    found="tokens",
                    allowed="tokens if these samples have only tensors and columns of JSON values; dealt",
                    fix="list the node before nodes that start work (reward_submit), or set placement.share=dealt",
                ) from error


def pool_of(c: StepContext) -> GroupPool:
    """Return an empty `GroupPool`, in which replicas collect groups before they share them out."""
    return GroupPool(c.layout.dp_group, c.cuts, once=c.config.actor.engine.share_prefixes)


def record_tokens(c: StepContext, samples: Batch) -> None:
    """Record the imbalance of tokens between replicas (max over mean) per mini-batch, and that of round-robin sharing.

    Collective over the replicas if groups are shared by tokens; otherwise nothing is recorded.
    """
    if c.cuts is None or ORDINAL not in samples:
        return
    tokens = tokens_of(samples, share=c.config.actor.engine.share_prefixes)
    numbers, parts = samples[ORDINAL], c.layout.dp_size
    local = [[numbers[places[0]], sum(tokens[i] for i in places)] for places in group_places(samples["uid"])]
    shares: list[list[list[int]]] = c.layout.dp_group.all_gather_json(local)
    groups = sorted((number, count, part) for part, share in enumerate(shares) for number, count in share)
    counts = [count for _, count, _ in groups]
    even = max_over_mean(counts, [part for _, _, part in groups], parts, c.cuts)
    dealt = max_over_mean(counts, [number % parts for number, _, _ in groups], parts, c.cuts)
    c.metrics.mean("balance/tokens_max_over_mean", even, 1)  # every rank adds the same value
    c.metrics.mean("balance/tokens_max_over_mean_dealt", dealt, 1)


class GroupPool:
    """Collects this replica's groups of samples. All methods are collective over the replicas.

    Args:
        group: one rank of every replica, in the order of the replicas.
        cuts: positions of groups at which mini-batches begin: each mini-batch is shared by tokens (`share_groups`);
            None: groups are shared round-robin.
        once: whether the prompt of a group counts once among its tokens.
    """

    def __init__(self, group: WorkerGroup, cuts: Sequence[int] | None = None, *, once: bool = False) -> None:
        self._once = once
        self._group, self._rank, self._size, self._cuts = group, group.rank, group.size, cuts
        self._samples: list[Batch] = []
        self._owners: list[int] = []
        self._counts: list[int] = []
        self._tokens: list[int] = []

    def __len__(self) -> int:
        """Return the number of groups added so far, over all replicas."""
        return len(self._owners)

    def add(self, samples: Batch, keep: list[bool], numbers: Sequence[int] | None = None) -> None:
        """Add those groups of this replica's new `samples` whose entry in `keep` (one per group) is True.

        Args:
            numbers: number of each of this replica's groups, ascending; the new groups of all replicas are ordered by
                these numbers. None: the first groups of all replicas come first, then the second ones, and so on.
        """
        groups = [group if kept else [] for group, kept in zip(group_places(samples["uid"]), keep, strict=True)]
        tokens = [0] * len(samples) if self._cuts is None else tokens_of(samples, share=self._once)
        self._samples.append(samples.select([place for group in groups for place in group]))
        order: list[tuple[int, ...]] = [()] * len(groups) if numbers is None else [(number,) for number in numbers]
        sizes = [
            [len(group), sum(tokens[place] for place in group), *number]
            for group, number in zip(groups, order, strict=True)
        ]
        shares: list[list[list[int]]] = self._group.all_gather_json(sizes)
        added = sorted(
            (*number, place, replica, count, total)
            for replica, share in enumerate(shares)
            for place, (count, total, *number) in enumerate(share)
            if count
        )
        for *_, replica, count, total in added:
            self._owners.append(replica)
            self._counts.append(count)
            self._tokens.append(total)

    def split(self, wanted: int) -> tuple[Batch, Batch]:
        """Return this replica's share of the first `wanted` groups, and of the rest; each group is contiguous.

        With sharing by tokens the column ORDINAL holds the numbers of the groups. The remaining groups are always
        shared round-robin, because `read_surplus` expects this order in a checkpoint.

        Raises:
            ValueError: a column cannot be sent.
        """
        taker = [(k if k < wanted else k - wanted) % self._size for k in range(len(self))]
        if self._cuts is not None:
            for replica, share in enumerate(share_groups(self._tokens[:wanted], self._size, self._cuts)):
                for k in share:
                    taker[k] = replica
        samples, numbers = self._moved(taker)
        ordered = sorted(numbers)
        first = [k for k in ordered if k < wanted]
        batch = samples.select(self._places(numbers, first))
        if self._cuts is not None:
            batch.set(ORDINAL, [k for k in first for _ in range(self._counts[k])])
        return batch, samples.select(self._places(numbers, [k for k in ordered if k >= wanted]))

    def _moved(self, taker: list[int]) -> tuple[Batch, list[int]]:
        """Send each group to its replica in `taker`; return this replica's new samples and their groups' numbers."""
        samples = Batch.concat(self._samples)
        numbers = [k for k, owner in enumerate(self._owners) if owner == self._rank]
        if self._size == 1:
            return samples, numbers
        leaving = [[k for k in numbers if taker[k] == r and r != self._rank] for r in range(self._size)]
        spans = samples.to_blocks([self._places(numbers, groups) for groups in leaving])
        blocks = [span.block.tobytes() if groups else b"" for span, groups in zip(spans, leaving, strict=True)]
        arrived = [Batch.from_bytes(data) for data in self._group.all_to_all_bytes(blocks) if data]
        staying = [k for k in numbers if taker[k] == self._rank]
        came = [k for k, to in enumerate(taker) if to == self._rank and self._owners[k] != self._rank]
        came.sort(key=self._owners.__getitem__)  # by sending rank: the order in which all_to_all returns the groups
        return Batch.concat([samples.select(self._places(numbers, staying)), *arrived]), staying + came

    def _places(self, numbers: list[int], groups: list[int]) -> list[int]:
        """Return the indices of the samples of `groups` in a batch that consists of the groups `numbers`, in order."""
        ends = dict(zip(numbers, accumulate(self._counts[k] for k in numbers), strict=True))
        return [place for k in groups for place in range(ends[k] - self._counts[k], ends[k])]
