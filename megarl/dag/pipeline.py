"""Declare a task graph node by node; `build` checks it and returns the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megarl.dag.graph import TaskGraph
from megarl.dag.node import Node, NodeType, Role
from megarl.dag.stage import LOADER_FIELDS
from megarl.errors import UserError


class Pipeline:
    """A list of nodes on its way to a TaskGraph.

    >>> def same(worker, batch): return batch
    >>> p = Pipeline("demo", "two steps").add_node("a", same).add_node("b", same, deps=["a"])
    >>> p.build().order()
    ['a', 'b']
    """

    def __init__(self, id: str, description: str = "") -> None:
        self.id, self.description = id, description
        self._nodes: dict[str, Node] = {}

    def add_node(
        self,
        id: str,
        func: Callable[..., Any] | str,
        deps: Sequence[str] = (),
        type: NodeType = NodeType.COMPUTE,
        role: Role = Role.DEFAULT,
        *,
        reads: Sequence[str] | None = None,
        writes: Sequence[str] | None = None,
        only_forward: bool = False,
        agent_group: int = 0,
        retry_limit: int = 0,
        filter: Callable[..., Any] | str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Pipeline:
        """Add a node (see `megarl.dag.node.Node`); dependencies may be added later. Returns the pipeline.

        Raises:
            UserError: the id is empty, taken, or contains "/" (phases are named after nodes).
        """
        where = f"pipeline {self.id!r}"
        if not id or "/" in id:
            raise UserError("a node id is a non-empty word without '/'", where=where, found=id)
        if id in self._nodes:
            raise UserError(f"two nodes are called {id!r}", where=where, fix="give every node its own id")
        if isinstance(deps, str):
            raise UserError("deps is a list of node ids", where=f"{where}, node {id!r}", found=deps, fix=f"[{deps!r}]")
        self._nodes[id] = Node(
            id,
            func,
            tuple(dict.fromkeys(deps)),
            type,
            role,
            None if reads is None else tuple(reads),
            None if writes is None else tuple(writes),
            only_forward,
            agent_group,
            retry_limit,
            filter,
            dict(config or {}),
        )
        return self

    def build(self, initial_fields: Iterable[str] = LOADER_FIELDS) -> TaskGraph:
        """Check everything and return the graph.

        Args:
            initial_fields: names on the batch that enters the graph.

        Raises:
            UserError: no node, an unknown dependency, a cycle, a func that does not import, or a node that reads a
                field which neither the initial batch has nor an ancestor writes.
        """
        graph = TaskGraph(self.id, self.description, self._nodes.values())
        graph = TaskGraph(self.id, self.description, [node.resolved() for node in graph])
        graph.check(initial_fields)
        return graph
