"""Which devices run which nodes.

Nodes that share a model stay together, nodes without a model go where their data is made, and what is left are teams:
sets of nodes with devices of their own. Devices are apportioned to teams evenly or by parameters, and taken from as few
machines as possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.dag.graph import TaskGraph
from megarl.dag.split import split

Strategy = Literal["even", "param_aware"]


@dataclass(frozen=True)
class Device:
    """One accelerator (or CPU worker): its global rank, and the machine it is in."""

    rank: int
    machine: int = 0


@dataclass(frozen=True)
class NodeTeam:
    """Nodes that share devices.

    Attributes:
        nodes: ids in topological order.
        ranks: global ranks of their devices, rising.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]


def apportion(devices: int, weights: Sequence[float]) -> list[int]:
    """Shares of `devices`, at least one each, otherwise in proportion to `weights` (largest remainder).

    Raises:
        ValueError: fewer devices than shares; says how many are missing. Or a weight that is not positive.

    >>> apportion(8, [1, 1, 1]), apportion(8, [70, 7, 7])
    ([3, 3, 2], [6, 1, 1])
    """
    if any(weight <= 0 for weight in weights):
        raise ValueError(f"weights must be positive, got {list(weights)}")
    missing = len(weights) - devices
    if missing > 0:
        raise ValueError(f"{len(weights)} teams need a device each, {devices} given: {missing} missing")
    shares = [1] * len(weights)
    # One at a time, to whoever has least for its weight: stays exact when a minimum of one distorts the quotas.
    for _ in range(devices - len(weights)):
        neediest = max(range(len(weights)), key=lambda i: (weights[i] / (shares[i] + 0.5), -i))
        shares[neediest] += 1
    return shares


def teams_of(graph: TaskGraph, together: Iterable[Iterable[str]] = ()) -> list[list[str]]:
    """Sets of nodes that must or should share devices, each in topological order.

    Nodes that work on one model, or that `together` names, share devices. Neighbours in a segment of `split` do too,
    unless their teams have nodes that could run at the same time. A segment without any model joins the one it waits
    for.

    Args:
        graph: the graph.
        together: further sets of node ids to colocate (an actor and a rollout that decodes on its weights).
    """
    teams = _Teams(graph)
    first: dict[str, str] = {}
    for node in graph:
        if node.model is not None:
            teams.join(first.setdefault(node.model, node.id), node.id)
    for ids in together:
        anchor, *rest = [graph[id].id for id in ids]
        for id in rest:
            teams.join(anchor, id)
    segments = split(graph)
    for segment in segments:
        for a, b in itertools.pairwise(segment.nodes):
            if not teams.concurrent(a, b):
                teams.join(a, b)
    for segment in segments:
        if segment.after and not any(graph[id].model for id in teams.of(segment.name)):
            teams.join(segment.after[0], segment.name)
    return teams.lists()


class _Teams:
    """A partition of the nodes that only gets coarser."""

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self._name = {id: id for id in graph.order()}

    def of(self, id: str) -> list[str]:
        return [other for other, name in self._name.items() if name == self._name[id]]

    def join(self, a: str, b: str) -> None:
        new = self._name[a]
        for id in self.of(b):
            self._name[id] = new

    def concurrent(self, a: str, b: str) -> bool:
        """Whether a node of a's team and one of b's, if these are two teams, do not depend on each other."""
        if self._name[a] == self._name[b]:
            return False
        ours, theirs = self.of(a), self.of(b)
        related = {id: {*self._graph.upstream(id), *self._graph.downstream(id)} for id in ours}
        return any(other not in related[id] for id in ours for other in theirs)

    def lists(self) -> list[list[str]]:
        groups: dict[str, list[str]] = {}
        for id, name in self._name.items():
            groups.setdefault(name, []).append(id)
        return list(groups.values())


def place(
    graph: TaskGraph,
    devices: Sequence[Device],
    *,
    colocate: bool = True,
    strategy: Strategy = "even",
    parameters: Mapping[str, float] | None = None,
    together: Iterable[Iterable[str]] = (),
) -> list[NodeTeam]:
    """Teams with their devices.

    Args:
        graph: the graph.
        devices: all devices.
        colocate: one team on all devices (roles take turns); False: teams of their own, which run concurrently.
        strategy: `even`, or `param_aware` (devices in proportion to the parameters a team computes with).
        parameters: parameters of the model of each node id, for `param_aware`; models shared by nodes count once.
        together: see `teams_of`.

    Raises:
        ValueError: fewer devices than teams, or `param_aware` without the size of a team.
    """
    groups = [graph.order()] if colocate else teams_of(graph, together)
    weights = [1.0] * len(groups)
    if strategy == "param_aware" and not colocate:
        weights = [_load(graph, nodes, parameters or {}) for nodes in groups]
    shares = apportion(len(devices), weights)
    ranks = _pick(shares, devices)
    return [NodeTeam(tuple(nodes), tuple(mine)) for nodes, mine in zip(groups, ranks, strict=True)]


def _load(graph: TaskGraph, nodes: Sequence[str], parameters: Mapping[str, float]) -> float:
    sizes: dict[str, float] = {}
    for id in nodes:
        if id in parameters:
            key = graph[id].model or id
            sizes[key] = max(sizes.get(key, 0.0), parameters[id])
    if not sizes:
        raise ValueError(f"param_aware needs the parameters of one of these nodes: {', '.join(nodes)}")
    return sum(sizes.values())


def _pick(shares: Sequence[int], devices: Sequence[Device]) -> list[list[int]]:
    """Ranks for each share. Large shares choose first; a share that fits into one machine stays in one."""
    free: dict[int, list[int]] = {}
    for device in sorted(devices, key=lambda d: (d.machine, d.rank)):
        free.setdefault(device.machine, []).append(device.rank)
    chosen: list[list[int]] = [[] for _ in shares]
    for team in sorted(range(len(shares)), key=lambda i: (-shares[i], i)):
        need = shares[team]
        while need:
            fits = [m for m, ranks in free.items() if len(ranks) >= need]
            # The tightest machine that fits leaves the roomy ones to others; if none does, empty the roomiest.
            machine = min(fits, key=lambda m: len(free[m])) if fits else max(free, key=lambda m: len(free[m]))
            taken, free[machine] = free[machine][:need], free[machine][need:]
            chosen[team] += taken
            need -= len(taken)
    return [sorted(ranks) for ranks in chosen]
