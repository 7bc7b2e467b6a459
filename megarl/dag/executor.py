"""Walk a task graph on one worker.

Every worker runs this loop by itself; there is no controller process. The order of the walk, and so the order of all
exchanges between workers, is the same everywhere:

    for node in topological order:
        run it, if this rank is in the node's layout        (inputs are there: they were delivered below)
        for consumer of node, in topological order:
            same layout      -> hand the output over in process
            another layout   -> exchange it, if this rank is in either layout

Outputs are pushed as soon as they exist, so nodes on different devices that do not depend on each other overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from megarl.dag.exchange import DataLayout, Exchange
from megarl.dag.graph import TaskGraph
from megarl.dag.node import RESAMPLING_ROLES, Node, Status
from megarl.errors import MegarlError
from megarl.phase import phase

NodeEnd = Callable[[Node, Status, Any, float], None]


class NodeError(MegarlError):
    """A node raised; the message names node, function, attempts, and the original error."""


class Executor:
    """Runs a graph again and again; `statuses` and `seconds` tell about this rank's nodes in the last walk.

    With layouts, every process of the job makes its executor at the same point of the program.

    Args:
        graph: a built graph.
        exchange: moves batches; None: everything stays in this process.
        layouts: data layout of every node by id; None: every node runs in this process alone.
        rank: global rank of this process.
        on_node_end: called as `(node, status, output or None, seconds)` for every node that ended here.
    """

    def __init__(
        self,
        graph: TaskGraph,
        exchange: Exchange | None = None,
        layouts: Mapping[str, DataLayout] | None = None,
        rank: int = 0,
        on_node_end: NodeEnd | None = None,
    ) -> None:
        if exchange is None:
            from megarl.dag.exchange_local import LocalExchange

            exchange = LocalExchange()
        alone = DataLayout(((rank,),))
        self.graph, self.exchange, self.rank, self.on_node_end = graph, exchange, rank, on_node_end
        self.layouts = dict.fromkeys(graph.nodes, alone) if layouts is None else dict(layouts)
        missing = [id for id in graph.nodes if id not in self.layouts]
        if missing:
            raise ValueError(f"nodes without a layout: {missing}")
        self.exchange.prepare([(self.layouts[dep], self.layouts[node.id]) for node in graph for dep in node.deps])
        self.statuses: dict[str, Status] = {}
        self.seconds: dict[str, float] = {}
        self._inbox: dict[str, dict[str, Any]] = {}
        self._held: dict[DataLayout, list[str]] = {}

    def run(self, worker: Any, batch: Any, step: int = 0) -> Any:
        """One walk.

        Args:
            worker: first argument of every node's function.
            batch: this rank's part of the initial samples; every entry node gets it.
            step: stamps the exchanges, so that those of two steps can never be confused.

        Returns:
            The merged outputs of the exit nodes that ran here; None when none did.

        Raises:
            NodeError: a node failed more than `retry_limit` times. Errors of this package pass through with the node
                added as a note. The node is FAILED, its descendants SKIPPED, what had not started PENDING.
        """
        mine = [id for id in self.graph.order() if self.rank in self.layouts[id].ranks]
        self.statuses = {id: Status.PENDING if self.graph[id].deps else Status.READY for id in mine}
        self.seconds, self._inbox, self._held = {}, {id: {} for id in self.graph.nodes}, {}
        results: dict[str, Any] = {}
        for id in self.graph.order():
            output = None
            if self.rank in self.layouts[id].ranks:
                output = self._run_node(self.graph[id], worker, batch)
                self._remember(self.layouts[id], output)
            self._deliver(id, output, step)
            if not self.graph.children(id) and output is not None:
                results[id] = output
        return self.exchange.merge(results) if results else None

    def _deliver(self, id: str, output: Any, step: int) -> None:
        """Give `output` to all consumers, not only the first."""
        src = self.layouts[id]
        moved: dict[DataLayout, Any] = {}
        for consumer in sorted(self.graph.children(id), key=self.graph.order().index):
            dst = self.layouts[consumer]
            if dst == src:
                moved[dst] = output
            elif dst not in moved and self.rank in src.ranks | dst.ranks:
                with phase(f"exchange:{id}->{consumer}"):
                    moved[dst] = self.exchange.redistribute(
                        output, src, dst, key=f"step {step}: {id} -> {consumer}", held=self._held.get(dst)
                    )
                if self.rank in dst.ranks:
                    self._remember(dst, moved[dst])
            if self.rank in dst.ranks:
                self._inbox[consumer][id] = moved[dst]
                if len(self._inbox[consumer]) == len(self.graph[consumer].deps):
                    self.statuses[consumer] = Status.READY

    def _remember(self, layout: DataLayout, batch: Any) -> None:
        ids = self.exchange.ids(batch)
        if ids is not None:
            self._held[layout] = ids

    def _run_node(self, node: Node, worker: Any, initial: Any) -> Any:
        self.statuses[node.id] = Status.RUNNING
        start = time.perf_counter()
        output = None
        try:
            with phase(node.id):
                output = self._attempts(node, worker, initial)
            self.statuses[node.id] = Status.COMPLETED
        except BaseException:
            self.statuses[node.id] = Status.FAILED
            self.statuses |= {id: Status.SKIPPED for id in self.graph.downstream(node.id) if id in self.statuses}
            raise
        finally:
            self.seconds[node.id] = time.perf_counter() - start
            self._inbox[node.id] = {}
            if self.on_node_end is not None:
                self.on_node_end(node, self.statuses[node.id], output, self.seconds[node.id])
        return output

    def _attempts(self, node: Node, worker: Any, initial: Any) -> Any:
        for attempt in range(1, node.retry_limit + 2):
            try:
                given = self._input(node, worker, initial)
                # A copy each time: stages add fields in place, and a failed attempt may have added some already.
                output = node.func(worker, self.exchange.copy(given), **node.config)  # type: ignore[operator]
                return self._checked(node, given, output)
            except Exception as error:
                if attempt <= node.retry_limit:
                    continue
                story = f"node {node.id!r} ({node.func_name}) failed, attempt {attempt} of {node.retry_limit + 1}"
                if isinstance(error, MegarlError):
                    error.add_note(story)
                    raise
                raise NodeError(f"{story}: {type(error).__name__}: {error}") from error
        raise AssertionError("a node is attempted at least once")

    def _input(self, node: Node, worker: Any, initial: Any) -> Any:
        given = self.exchange.merge(self._inbox[node.id]) if node.deps else initial
        if node.filter is None:
            return given
        assert callable(node.filter), "build() imports filters"
        return self.exchange.keep(given, node.filter(worker, given))

    def _checked(self, node: Node, given: Any, output: Any) -> Any:
        """The output, once it holds what the node promised about the samples it was given."""
        if output is None:
            raise NodeError(
                f"node {node.id!r} ({node.func_name}) returned None; a stage returns a batch\n"
                "  fix:     end the function with `return batch`"
            )
        lost = [name for name in node.writes or () if name not in output]
        if lost:
            raise NodeError(f"node {node.id!r} ({node.func_name}) declares writes={lost} but did not write them")
        if node.role not in RESAMPLING_ROLES and len(output) != len(given):
            raise NodeError(
                f"node {node.id!r} ({node.func_name}) returned {len(output)} samples for {len(given)}; only nodes of "
                f"role {' or '.join(role.name for role in RESAMPLING_ROLES)}, or a node's filter, may change them"
            )
        return output
