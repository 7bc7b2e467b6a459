"""Run a task graph on one worker.

Every worker runs this loop by itself; there is no controller process. The order of nodes is the same everywhere:

    samples = the graph's input batch
    for each node of this worker's team, in topological order:
        samples = samples with the fields from other teams that the node uses      (take)
        samples = samples with the fields that the node wrote; of a node that
                  resamples its new samples, which replicas may exchange
        send the fields that other teams read                                      (give)

A node can read only the fields that it declares. Edges put every reader between the last writer before it and the next
writer, so a node always reads the right values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megarl.dag.graph import TaskGraph
from megarl.dag.node import Node
from megarl.system.errors import MegarlError
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from megarl.data.batch import Batch


class NodeError(MegarlError):
    """A node raised an error; the message names the node, its function and the original error."""


class Channel(Protocol):
    """Transfers samples between teams around the nodes of this worker; every rank of its team calls both methods."""

    def take(self, context: Any, node: Node, batch: Batch | None) -> Batch | None:
        """Return `batch` (None: no samples yet) with the fields from other teams that `node` uses."""

    def give(self, context: Any, node: Node, batch: Batch) -> None:
        """Send the fields that `node` wrote to the teams that use them."""


class NoChannel:
    """The channel of a run with one team, which transfers nothing."""

    tokens = 0

    def take(self, context: Any, node: Node, batch: Batch | None) -> Batch | None:
        """Return the batch unchanged, because there are no other teams."""
        return batch

    def give(self, context: Any, node: Node, batch: Batch) -> None:
        """Do nothing, because there are no other teams."""

    def done(self, step: int) -> None:
        """Do nothing, because there are no other teams."""


class Executor:
    """Runs a graph, once per step.

    Args:
        roles: the roles by the argument names of stages (`megarl.dag.stage.ROLES`).
        nodes: ids of the nodes that this worker's team runs, in the graph's order; None: all.
        channel: transfers to and from other teams; None: there are no other teams.
        exchange: function that redistributes the samples which a node produced among the replicas of the team and
            returns this replica's share; every rank calls it. None: every replica keeps its samples.
    """

    def __init__(
        self,
        graph: TaskGraph,
        roles: Mapping[str, Any] | None = None,
        nodes: Sequence[str] | None = None,
        channel: Channel | None = None,
        exchange: Callable[[Any, Node, Batch], Batch] | None = None,
    ) -> None:
        self.graph, self._roles = graph, roles or {}
        self._channel, self._exchange = channel or NoChannel(), exchange
        self.nodes = graph.order() if nodes is None else list(nodes)

    def run(self, context: Any, prompts: Batch | None, more: Iterator[Batch] | None = None) -> Batch:
        """Run the graph once, and return the samples with all fields at the end.

        Args:
            context: first argument of every node's function.
            prompts: this rank's part of the graph's input batch; None: its team starts with samples of another
                team.
            more: later prompts, for a stage that declares `refills`.

        Raises:
            NodeError: a node failed. Errors of this package are raised unchanged, with the node in a note.
        """
        batch = None if prompts is None else prompts.copy()
        for id in self.nodes:
            node = self.graph[id]
            batch = self._channel.take(context, node, batch)
            assert batch is not None, "the first node of a team gets prompts, or samples of another team"
            with phase(node.id):
                batch = self._call(node, context, batch, more)
            if self._exchange is not None and node.declared.resamples:
                batch = self._exchange(context, node, batch)
            self._channel.give(context, node, batch)
        assert batch is not None, "a team runs at least one node"
        return batch

    def _call(self, node: Node, context: Any, batch: Batch, more: Iterator[Batch] | None) -> Batch:
        """Run the node, check that it kept to its contract, and return the samples after it."""
        from megarl.dag.guard import GuardedBatch, settle, writes_in_place
        from megarl.dag.retry import call_again
        from megarl.system.device import ProcessState

        before, state = writes_in_place(node, batch), ProcessState.now()
        try:
            extra: dict[str, Any] = {name: self._roles[name] for name in node.may_take if name in self._roles}
            extra |= {name: self._roles[name] for name in node.needs_roles}
            if node.declared.refills:
                extra["more"] = lambda: self._refill(node, context, more)

            def call() -> Batch:
                given = batch.select(range(len(batch))) if node.retry else batch  # a copy for each attempt
                return node.func(context, GuardedBatch.of(given, node), **extra, **node.config)  # type: ignore[operator]

            output = call_again(node, context, call) if node.retry else call()
            state.check(f"node {node.id!r} ({node.func_name})")
            return settle(node, batch, output, before)
        except Exception as error:
            if isinstance(error, MegarlError):
                error.add_note(f"node {node.id!r} ({node.func_name}) failed")
                raise
            raise NodeError(f"node {node.id!r} ({node.func_name}) failed: {type(error).__name__}: {error}") from error

    def _refill(self, node: Node, context: Any, more: Iterator[Batch] | None) -> Batch:
        """Run all nodes before `node` on the next prompts, and return the resulting batch for `node`."""
        from megarl.dag.guard import GuardedBatch

        if more is None:
            raise NodeError(f"node {node.id!r} requests more prompts, but only a training step can load more")
        batch = next(more).copy()
        for id in self.graph.upstream(node.id):
            batch = self._call(self.graph[id], context, batch, more)
        return GuardedBatch.of(batch, node)
