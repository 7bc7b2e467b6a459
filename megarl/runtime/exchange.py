"""Replicas of a team exchange whole groups before they train on them, so that all have about the same number of tokens.

    replica 0   rollout: groups 0 2 4 6   --.              .-->  groups 0 3 4 7   log-probs, updates
                                             >  exchange  <
    replica 1   rollout: groups 1 3 5 7   --'              '-->  groups 1 2 5 6

This follows the last node that makes the samples of an update, before anything else is computed of them: `rollout`, or
a node after it that resamples. Dynamic sampling collects groups from all replicas anyway, and shares them by tokens
itself. In a team that samples come to from another one the store does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.dag.stage import Kind
from megarl.data.balance import max_over_mean
from megarl.data.groups import ORDINAL, group_places, tokens_of
from megarl.errors import ConfigError
from megarl.runtime.pool import GroupPool
from megarl.tracing import phase

if TYPE_CHECKING:
    from megarl.dag.graph import TaskGraph
    from megarl.dag.node import Node
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext


class TokenExchange:
    """See `megarl.dag.executor.Exchange`.

    Args:
        graph: that the team walks.
        nodes: what it walks of it.

    Attributes:
        makers: the nodes after which samples are exchanged.
    """

    def __init__(self, graph: TaskGraph, nodes: Sequence[str]) -> None:
        trained = {graph.inputs(id).samples for id in nodes if graph[id].kind is Kind.MODEL_TRAIN}
        # What dynamic sampling walks again for more samples gives them to it as they are.
        repeated = {id for node in graph if node.declared.refills for id in graph.upstream(node.id)}
        self.makers = frozenset(id for id in nodes if id in trained - repeated)

    def share(self, context: StepContext, node: Node, board: Batch) -> Batch:
        """`board` of this replica after the exchange, or as it is where nothing is to be exchanged.

        Raises:
            ConfigError: a column cannot be sent.
        """
        if node.id not in self.makers or ORDINAL in board or context.layout.dp_size == 1:
            return board
        with phase("exchange"):
            pool = GroupPool(context.layout.dp_group, context.cuts)
            pool.add(board, [True] * len(group_places(board["uid"])))
            try:
                return pool.deal(len(pool))[0]
            except ValueError as error:
                raise ConfigError(
                    f"the samples that node {node.id!r} made cannot go to other replicas: {error}",
                    where="placement.share",
                    found="tokens",
                    allowed="columns of JSON values where samples are made that models are trained on",
                    fix="list the node before those whose work is under way (reward_submit), or set dealt",
                ) from error


def record_tokens(c: StepContext, samples: Batch) -> None:
    """How even the tokens of the replicas are over the mini-batches, and how even they were if groups were dealt.

    Collective over the replicas where groups are shared by tokens; elsewhere it does nothing.
    """
    if c.cuts is None or ORDINAL not in samples:
        return
    tokens, numbers, parts = tokens_of(samples), samples[ORDINAL], c.layout.dp_size
    mine = [[numbers[places[0]], sum(tokens[i] for i in places)] for places in group_places(samples["uid"])]
    shares: list[list[list[int]]] = c.layout.dp_group.all_gather_json(mine)
    groups = sorted((number, count, part) for part, share in enumerate(shares) for number, count in share)
    counts = [count for _, count, _ in groups]
    even = max_over_mean(counts, [part for _, _, part in groups], parts, c.cuts)
    dealt = max_over_mean(counts, [number % parts for number, _, _ in groups], parts, c.cuts)
    c.metrics.mean("balance/tokens_max_over_mean", even, 1)  # the same on all ranks
    c.metrics.mean("balance/tokens_max_over_mean_dealt", dealt, 1)
