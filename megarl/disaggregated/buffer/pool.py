"""Around the nodes of a rollout's team whose groups go to others as they get ready (`buffer.flow`).

rollout, nodes after it    what others use of it is put aside         give
all nodes are through      all of it goes to the store                collect
now and then               with others that are finished, in one call  swap
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from megarl.data.groups import group_places
from megarl.disaggregated.buffer.channel import groups_of, outgoing
from megarl.disaggregated.buffer.core import StoreError
from megarl.disaggregated.buffer.flow import Finished
from megarl.metrics import Metrics

if TYPE_CHECKING:
    from megarl.dag.node import Node
    from megarl.dag.placement import Placement
    from megarl.data.batch import Batch
    from megarl.data.wire import Span
    from megarl.disaggregated.buffer.client import StoreClient
    from megarl.disaggregated.buffer.core import GroupInfo


@dataclass(frozen=True)
class Ready:
    """Groups that are finished.

    Attributes:
        numbers: of their prompts.
        groups: what they hold.
        samples: of all of them, in their order, with what goes, by key of handover.
        metrics: of these samples; they count with the first group.
    """

    numbers: list[int]
    groups: list[GroupInfo]
    samples: dict[str, Batch]
    metrics: Metrics

    def select(self, numbers: Sequence[int]) -> Ready:
        """Some of them, with the metrics if the first one is among them."""
        places = [self.numbers.index(number) for number in numbers]

        def picked(some: Batch) -> Batch:
            where = group_places(some["uid"])
            return some.select(list(chain.from_iterable(where[place] for place in places)))

        return Ready(
            list(numbers),
            [self.groups[place] for place in places],
            {key: picked(some) for key, some in self.samples.items()},
            self.metrics if self.numbers[0] in numbers else Metrics(),
        )


class PoolCrossing:
    """See `megarl.dag.executor.Crossing`. Every rank of the rollout's team has one; they do not talk to each other.

    Records in `context.metrics` `store/given_gb`, 10^9 bytes given by this rank.

    Args:
        placement: of the nodes.
        client: of this worker.
        is_lead: it gives for its replica.

    Attributes:
        aside: what was put aside of the samples that are on their way through the nodes, by key of handover.
        tokens: of the samples that it has collected, prompts included.
    """

    def __init__(self, placement: Placement, client: StoreClient, is_lead: bool) -> None:
        self._placement, self._client, self._is_lead = placement, client, is_lead
        self.aside: dict[str, Batch] = {}
        self.tokens = 0

    def take(self, context: Any, node: Node, board: Batch | None) -> Batch | None:
        """Nothing comes from other teams."""
        return board

    def give(self, context: Any, node: Node, board: Batch) -> None:
        """Put aside what other teams use of what `node` wrote."""
        if self._is_lead:
            for handover in self._placement.given(node.id):
                self.aside[handover.key] = outgoing(handover, board)

    def collect(self, numbers: Sequence[int], board: Batch, metrics: Metrics) -> Ready | None:
        """What was put aside, as the groups of the prompts `numbers`, in the order of `board`.

        Args:
            numbers: of the prompts.
            board: the samples after all nodes.
            metrics: of these samples.

        Returns:
            None: another rank gives for this replica.
        """
        if not self._is_lead:
            return None
        groups = groups_of(board)
        self.tokens += sum(group.tokens for group in groups)
        aside, self.aside = self.aside, {}
        return Ready(list(numbers), groups, aside, metrics)

    def swap(self, context: Any, ready: Sequence[Ready], useless: Sequence[int], version: int, most: int) -> list[int]:
        """Hand over groups that are finished, and take prompts; see `StoreClient.swap`.

        Returns:
            Numbers of the prompts.

        Raises:
            StoreError: a column cannot be sent, or the store refuses it.
        """
        finished: list[Finished] = []
        blocks: defaultdict[str, list[Span]] = defaultdict(list)
        for some in ready:
            metrics = [json.dumps(some.metrics.to_json()), *[None] * (len(some.numbers) - 1)]
            finished += map(Finished, some.numbers, some.groups, metrics)
            for key, batch in some.samples.items():
                try:
                    blocks[key] += batch.to_blocks(group_places(batch["uid"]))
                except ValueError as error:  # of a column that cannot be sent
                    raise StoreError(f"prompts {some.numbers[:4]}: {error}") from error
        numbers, size = self._client.swap(finished, blocks, useless, version, most)
        context.metrics.sum("store/given_gb", size / 1e9)
        return numbers


def unused_groups(client: StoreClient, step: int, part: int, parts: int) -> tuple[list[Ready], dict[int, int]]:
    """One of `parts` shares of what is finished and of no step until `step`, one by one; and versions by number."""
    from megarl.data.batch import Batch

    found, versions = [], {}
    for group in sorted(client.unused(step, part, parts), key=lambda group: group.number):
        assert group.info is not None, "it is finished"
        samples = {key: Batch.from_blocks([span]) for key, span in group.refs.items()}
        metrics = Metrics() if group.metrics is None else Metrics.from_json(json.loads(group.metrics))
        found.append(Ready([group.number], [group.info], samples, metrics))
        versions[group.number] = group.version
    return found, versions
