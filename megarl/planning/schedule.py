"""When the nodes of a step begin and end, given their seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement
from megarl.dag.stage import Role


@dataclass(frozen=True)
class Schedule:
    """Which team runs each node of the task graph, and for which other nodes the node waits."""

    nodes: tuple[tuple[str, str, tuple[str, ...]], ...]  # (id, team, dependencies) of each node, in the graph's order
    actor: str  # the actor's team
    rollout: str  # the team that generates samples
    ahead: bool  # generation runs ahead of training

    @classmethod
    def of(cls, config: RunConfig, graph: TaskGraph, placement: Placement) -> Schedule:
        """Return the schedule of a recipe whose teams are `placement`."""
        home = {id: team.name for team in placement.teams for id in team.nodes}
        actor, rollout = placement.home(Role.ACTOR), placement.home(Role.ROLLOUT)
        nodes = tuple((id, home[id], tuple(graph.parents(id))) for id in graph.order())
        return cls(nodes, actor.name, rollout.name, config.async_.max_staleness > 0)

    def run(self, seconds: Mapping[str, float], between: float, pause: float) -> tuple[dict[str, float], float]:
        """Return the start time of each node, and the seconds of a step (formula S1 of docs/planning.md).

        A team works on one node at a time, in the graph's order; a node begins when the nodes that it depends on have
        ended. If generation runs ahead, the team that is busy longest sets the pace.

        Args:
            seconds: duration of each node.
            between: seconds of work after the last node, before the next step.
            pause: part of `between` in which the rollout team waits.
        """
        free: dict[str, float] = {}
        busy: dict[str, float] = {}
        begins: dict[str, float] = {}
        ends: dict[str, float] = {}
        for id, team, waits in self.nodes:
            begin = free.get(team, 0.0)
            for other in waits:
                begin = max(begin, ends[other])
            begins[id], takes = begin, seconds.get(id, 0.0)
            ends[id] = free[team] = begin + takes
            busy[team] = busy.get(team, 0.0) + takes
        if not self.ahead:
            return begins, max(free.values()) + between
        busy[self.actor] += between
        if self.rollout != self.actor:
            busy[self.rollout] += pause
        return begins, max(busy.values())
