"""List the stages of a task graph in reading order; `build` checks them, derives the edges and returns the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megarl.dag.graph import TaskGraph
from megarl.dag.node import Node
from megarl.dag.stage import LOADER_FIELDS, Contract
from megarl.system.errors import UserError


class Pipeline:
    """A list of nodes on its way to a TaskGraph.

    Args:
        description: its purpose, in a few words.
        config: the run's configuration, for stages whose fields depend on it.

    >>> from megarl.dag.stage import stage
    >>> @stage(reads=["prompt_ids"], writes=["score"])
    ... def reward(context, batch): return batch
    >>> @stage(reads=["score"], writes=["advantages"])
    ... def advantage(context, batch): return batch
    >>> Pipeline("demo", "two steps").add(reward).add(advantage).build().parents("advantage")
    ['reward']
    """

    def __init__(self, id: str, description: str = "", config: Any = None) -> None:
        self.id, self.description, self.config = id, description, config
        self._nodes: dict[str, Node] = {}

    def add(
        self,
        func: Callable[..., Any] | str,
        id: str | None = None,
        *,
        deps: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        contract: Contract | None = None,
    ) -> Pipeline:
        """Add a node after those that are there. Returns the pipeline.

        Args:
            func: the stage, or its import path.
            id: name of the node; None: the stage's own.
            deps: ids of nodes that it must come after although no field says so.
            config: further keyword arguments of the stage.
            contract: the stage's reads and writes; None: those that it declares with `@stage`.

        Raises:
            UserError: the id is empty, taken, or contains "/" (phases are named after nodes).
        """
        where = f"pipeline {self.id!r}"
        if id is None:
            path = func if isinstance(func, str) else getattr(func, "__name__", "")
            id = path.rpartition(":")[2].rpartition(".")[2]
        if not id or "/" in id:
            raise UserError("a node id is a non-empty word without '/'", where=where, found=id)
        if id in self._nodes:
            raise UserError(f"two nodes are called {id!r}", where=where, fix="give every node its own id")
        if isinstance(deps, str):
            raise UserError("deps is a list of node ids", where=f"{where}, node {id!r}", found=deps, fix=f"[{deps!r}]")
        self._nodes[id] = Node(id, func, tuple(dict.fromkeys(deps)), dict(config or {}), contract)
        return self

    def build(self, entry: Iterable[str] = LOADER_FIELDS) -> TaskGraph:
        """Check everything and return the graph.

        Args:
            entry: fields of the batch that enters the graph.

        Raises:
            UserError: no node, an unknown dependency, a cycle, a func that does not import, or a node that reads a
                field which neither the entry has nor a node before it writes.
        """
        nodes = [node.resolved(self.config) for node in self._nodes.values()]
        return TaskGraph(self.id, self.description, nodes, entry)
