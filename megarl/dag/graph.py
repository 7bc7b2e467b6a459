"""A checked, immutable task graph and the questions one asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megarl.dag.node import Node
from megarl.dag.stage import LOADER_FIELDS
from megarl.errors import UserError, close_matches


class TaskGraph:
    """Nodes and their dependencies, without cycles.

    Raises:
        UserError: on construction, for an empty graph, a duplicate id, an unknown dependency, or a cycle.
    """

    def __init__(self, id: str, description: str, nodes: Iterable[Node]) -> None:
        self.id, self.description = id, description
        self.nodes: dict[str, Node] = {}
        for node in nodes:
            if node.id in self.nodes:
                raise UserError(f"two nodes are called {node.id!r}", where=self._where)
            self.nodes[node.id] = node
        if not self.nodes:
            raise UserError("the pipeline has no node", where=self._where, fix="add one with add_node")
        self._check_deps()
        self._children: dict[str, list[str]] = {id: [] for id in self.nodes}
        for node in self:
            for dep in node.deps:
                self._children[dep].append(node.id)
        self._order = self._kahn()

    @property
    def _where(self) -> str:
        return f"pipeline {self.id!r}"

    # -- queries -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, id: str) -> bool:
        return id in self.nodes

    def __getitem__(self, id: str) -> Node:
        if id not in self.nodes:
            raise UserError(f"no node {id!r}", where=self._where, allowed=self.nodes)
        return self.nodes[id]

    def order(self) -> list[str]:
        """Node ids in topological order; among nodes that are ready at once, in the order they were added."""
        return list(self._order)

    def entries(self) -> list[str]:
        """Nodes without dependencies."""
        return [node.id for node in self if not node.deps]

    def exits(self) -> list[str]:
        """Nodes nothing depends on."""
        return [id for id in self.nodes if not self._children[id]]

    def parents(self, id: str) -> list[str]:
        """Direct dependencies, in declared order."""
        return list(self[id].deps)

    def children(self, id: str) -> list[str]:
        """Nodes that depend on this one directly."""
        self[id]
        return list(self._children[id])

    def upstream(self, id: str) -> list[str]:
        """All ancestors, in topological order."""
        return self._reach(id, self.parents)

    def downstream(self, id: str) -> list[str]:
        """All descendants, in topological order."""
        return self._reach(id, self.children)

    def _reach(self, id: str, step: Callable[[str], list[str]]) -> list[str]:
        found: set[str] = set()
        todo = step(id)
        while todo:
            other = todo.pop()
            if other not in found:
                found.add(other)
                todo += step(other)
        return [other for other in self._order if other in found]

    def layers(self) -> list[list[str]]:
        """Nodes by longest distance from an entry; nodes of one layer do not depend on each other."""
        depth: dict[str, int] = {}
        for id in self._order:
            depth[id] = 1 + max((depth[dep] for dep in self.nodes[id].deps), default=-1)
        rows: list[list[str]] = [[] for _ in range(1 + max(depth.values()))]
        for id in self._order:
            rows[depth[id]].append(id)
        return rows

    def direct(self) -> list[tuple[str, str]]:
        """Edges without shortcuts: u -> w is left out when another path leads from u to w (transitive reduction)."""
        return [
            (dep, node.id)
            for node in self
            for dep in dict.fromkeys(node.deps)
            if not any(dep in self.upstream(other) for other in node.deps)
        ]

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self, initial_fields: Iterable[str] = LOADER_FIELDS) -> None:
        """Every field a node reads must be on the initial batch or be written by an ancestor.

        Raises:
            UserError: names the node, the field, and the node that would write it, if there is one.
        """
        initial = set(initial_fields)
        for id in self._order:
            ancestors = self.upstream(id)
            there = initial.union(*(self.nodes[other].writes or () for other in ancestors))
            for name in self.nodes[id].reads or ():
                if name not in there:
                    self._missing(id, name, there)

    def _missing(self, id: str, name: str, there: set[str]) -> None:
        writers = [node.id for node in self if name in (node.writes or ()) and node.id != id]
        if writers:
            later = [other for other in writers if other in self.downstream(id)]
            hint = (
                f"{writers[0]!r} writes it but runs after {id!r}; change the order"
                if later == writers
                else f"node {next(w for w in writers if w not in later)!r} writes it; add that to deps of {id!r}"
            )
        else:
            near = close_matches(name, there)
            hint = f"did you mean {near[0]!r}?" if near else "no node writes it; add a node that does"
        raise UserError(
            f"node {id!r} reads {name!r}, which none of its ancestors writes",
            where=self._where,
            found=f"ancestors: {', '.join(self.upstream(id)) or 'none'}",
            allowed=f"fields there: {', '.join(sorted(there)) or 'none'}",
            fix=hint,
        )

    def _check_deps(self) -> None:
        for node in self:
            for dep in node.deps:
                if dep not in self.nodes:
                    near = close_matches(dep, self.nodes)
                    raise UserError(
                        f"node {node.id!r} depends on {dep!r}, which does not exist",
                        where=self._where,
                        allowed=self.nodes,
                        fix=f"did you mean {near[0]!r}?" if near else "add the node, or drop the dependency",
                    )

    def _kahn(self) -> list[str]:
        open_deps = {node.id: len(node.deps) for node in self}
        ready = [id for id, count in open_deps.items() if count == 0]
        order: list[str] = []
        place = {id: number for number, id in enumerate(self.nodes)}
        while ready:
            id = min(ready, key=place.__getitem__)
            ready.remove(id)
            order.append(id)
            for child in self._children[id]:
                open_deps[child] -= 1
                if open_deps[child] == 0:
                    ready.append(child)
        if len(order) < len(self.nodes):
            raise UserError(
                f"the dependencies form a cycle: {' -> '.join(self._cycle(set(self.nodes) - set(order)))}",
                where=self._where,
                fix="remove one of these dependencies",
            )
        return order

    def _cycle(self, left: set[str]) -> list[str]:
        """One cycle among nodes that never became ready, written in the direction data would flow."""
        # Every such node has a dependency that never became ready either, so walking back must repeat itself.
        path = [next(id for id in self.nodes if id in left)]
        while path.count(path[-1]) == 1:
            path.append(next(dep for dep in self.nodes[path[-1]].deps if dep in left))
        return path[path.index(path[-1]) :][::-1]
