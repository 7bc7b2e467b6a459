"""Cut a graph into segments: runs of nodes between which work can fork or has to wait.

A graph is cut after every node whose successors go separate ways (to distinct exits, or along parallel paths that meet
again) and before every node where such paths meet. A direct edge beside a longer path is no fork: nothing can run
there in parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.dag.graph import TaskGraph


@dataclass(frozen=True)
class Segment:
    """A chain of nodes that run one after the other.

    Attributes:
        nodes: ids in order; the first one names the segment.
        after: names of the segments it waits for.
    """

    nodes: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def name(self) -> str:
        """Id of the first node."""
        return self.nodes[0]


def split(graph: TaskGraph) -> list[Segment]:
    """Segments in topological order; every node is in exactly one.

    >>> from megarl.dag.pipeline import Pipeline
    >>> def f(context, batch): return batch
    >>> p = Pipeline("p").add(f, "a").add(f, "b", deps=["a"]).add(f, "c", deps=["a"]).add(f, "d", deps=["b", "c"])
    >>> [(s.name, s.after) for s in split(p.build())]
    [('a', ()), ('b', ('a',)), ('c', ('a',)), ('d', ('b', 'c'))]
    """
    successors: dict[str, list[str]] = {id: [] for id in graph.nodes}
    predecessors: dict[str, list[str]] = {id: [] for id in graph.nodes}
    for source, target in graph.direct():
        successors[source].append(target)
        predecessors[target].append(source)
    chains: dict[str, list[str]] = {}
    head: dict[str, str] = {}
    for id in graph.order():
        before = predecessors[id]
        alone = len(before) == 1 and len(successors[before[0]]) == 1
        head[id] = head[before[0]] if alone else id
        chains.setdefault(head[id], []).append(id)
    return [
        Segment(tuple(nodes), tuple(dict.fromkeys(head[other] for other in predecessors[name])))
        for name, nodes in chains.items()
    ]
