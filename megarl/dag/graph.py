"""A checked, immutable task graph, and queries on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megarl.dag.edges import Inputs, derive
from megarl.dag.node import Node
from megarl.dag.stage import LOADER_FIELDS, Role, role_named
from megarl.system.errors import UserError


class TaskGraph:
    """The nodes, and the edges derived from their declarations (`megarl.dag.edges`), without cycles.

    Args:
        description: purpose of the graph, in a few words.
        entry: fields of the graph's input batch.
        models: further models of the run that generate: the weights of policies, whether stages take them or not.
    """

    def __init__(
        self,
        id: str,
        description: str,
        nodes: Iterable[Node],
        entry: Iterable[str] = LOADER_FIELDS,
        models: Iterable[Role] = (),
    ) -> None:
        self.id, self.description, self._where = id, description, f"pipeline {id!r}"
        self.policies = tuple(models)
        self.nodes: dict[str, Node] = {}
        for node in nodes:
            if node.id in self.nodes:
                raise UserError(
                    f"two nodes have the id {node.id!r}", where=self._where, fix="give every node its own id"
                )
            self.nodes[node.id] = node.resolved()
        if not self.nodes:
            raise UserError("the pipeline has no nodes", where=self._where, fix="add one with Pipeline.add")
        self.entry = tuple(entry)
        self._inputs = derive(list(self), self.entry, self._where)
        self._parents = {id: inputs.waits for id, inputs in self._inputs.items()}
        self._order = self._sorted()

    @property
    def roles(self) -> set[Role]:
        """The roles of the graph's nodes, and the roles of further models that the nodes' stages use."""
        named = {role_named(name) for node in self for name in node.needs_roles}
        return {node.role for node in self} | named | {*self.policies}

    @property
    def has_responses(self) -> bool:
        """Whether the graph's input batch already has responses, so that no node generates them."""
        return "response_ids" in self.entry

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, id: str) -> bool:
        return id in self.nodes

    def __getitem__(self, id: str) -> Node:
        if id not in self.nodes:
            raise UserError(f"the graph has no node {id!r}", where=self._where, allowed=self.nodes)
        return self.nodes[id]

    def order(self) -> list[str]:
        """Return the node ids in topological order; independent nodes keep the order of the list."""
        return list(self._order)

    def parents(self, id: str) -> list[str]:
        """Return the nodes on which this node depends directly, in the listed order."""
        self[id]
        return list(self._parents[id])

    def inputs(self, id: str) -> Inputs:
        """Return the inputs of node `id`."""
        self[id]
        return self._inputs[id]

    def upstream(self, id: str) -> list[str]:
        """Return all nodes that must run before this node, in topological order."""
        ancestors: set[str] = set()
        todo = self.parents(id)
        while todo:
            other = todo.pop()
            if other not in ancestors:
                ancestors.add(other)
                todo += self._parents[other]
        return [other for other in self._order if other in ancestors]

    def layers(self) -> list[list[str]]:
        """Return the nodes by their longest distance from the start; nodes of one layer do not depend on each other."""
        depth: dict[str, int] = {}
        for id in self._order:
            depth[id] = 1 + max((depth[dep] for dep in self._parents[id]), default=-1)
        rows: list[list[str]] = [[] for _ in range(1 + max(depth.values()))]
        for id in self._order:
            rows[depth[id]].append(id)
        return rows

    def direct(self) -> list[tuple[str, str]]:
        """Return the edges, without u -> w if another path leads from u to w (transitive reduction)."""
        return [
            (parent, id)
            for id, parents in self._parents.items()
            for parent in parents
            if not any(parent in self.upstream(other) for other in parents)
        ]

    def _sorted(self) -> list[str]:
        """Return the nodes in topological order: the next is the first listed node whose predecessors are done."""
        order: dict[str, None] = {}
        while left := [id for id in self.nodes if id not in order]:
            ready = next((id for id in left if all(parent in order for parent in self._parents[id])), None)
            if ready is None:
                raise UserError(
                    f"the dependencies form a cycle: {' -> '.join(self._cycle(set(left)))}",
                    where=self._where,
                    fix="remove one of these dependencies",
                )
            order[ready] = None
        return list(order)

    def _cycle(self, left: set[str]) -> list[str]:
        """Return a cycle among the nodes `left`, which wait for each other; each node must run before the next one."""
        # Each of these nodes depends on another one of them, so walking back ends in a cycle.
        path = [next(id for id in self.nodes if id in left)]
        while path.count(path[-1]) == 1:
            path.append(next(dep for dep in self._parents[path[-1]] if dep in left))
        return path[path.index(path[-1]) :][::-1]
