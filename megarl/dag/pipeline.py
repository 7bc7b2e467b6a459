"""Builds a task graph from a list of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megarl.dag.graph import TaskGraph
from megarl.dag.node import Node
from megarl.dag.stage import LOADER_FIELDS, Contract
from megarl.system.errors import UserError


class Pipeline:
    """A list of nodes in reading order; `build` checks them, derives the edges and returns the graph.

    Args:
        description: purpose of the graph, in a few words.
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
        retry: int = 0,
    ) -> Pipeline:
        """Append a node, and return the pipeline.

        Args:
            func: the stage, or its import path.
            id: name of the node; None: the stage's name.
            deps: ids of nodes that must run before this node, in addition to the nodes whose fields it reads.
            config: further keyword arguments of the stage.
            contract: the stage's reads and writes; None: those that its `@stage` declares.
            retry: how often a step calls the stage again after an error that its `@stage` lists in `retries_on`.
        """
        where = f"pipeline {self.id!r}"
        if id is None:
            path = func if isinstance(func, str) else getattr(func, "__name__", "")
            id = path.rpartition(":")[2].rpartition(".")[2]
        if not id or "/" in id:
            raise UserError(
                "a node id must be a non-empty word without '/'",
                where=where,
                found=id,
                fix="pass another id to Pipeline.add",
            )
        if id in self._nodes:
            raise UserError(f"two nodes have the id {id!r}", where=where, fix="give every node its own id")
        if isinstance(deps, str):
            raise UserError(
                "deps must be a list of node ids", where=f"{where}, node {id!r}", found=deps, fix=f"write [{deps!r}]"
            )
        self._nodes[id] = Node(id, func, tuple(dict.fromkeys(deps)), dict(config or {}), contract, retry=retry)
        return self

    def build(self, entry: Iterable[str] = LOADER_FIELDS) -> TaskGraph:
        """Check the nodes and return the graph; `entry` names the fields of its input batch."""
        nodes = [node.resolved(self.config) for node in self._nodes.values()]
        return TaskGraph(self.id, self.description, nodes, entry)
