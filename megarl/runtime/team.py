"""Which of the run's teams this worker is in (`megarl.dag.placement`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.dag.placement import ONLY_TEAM, Placement, TeamPlan, place
from megarl.dag.stage import Role
from megarl.errors import ConfigError
from megarl.processes import TEAM, WORKER

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


@dataclass(frozen=True)
class Team:
    """The team of this worker, among all of the run.

    Attributes:
        plan: roles, layout and nodes of this team.
        placement: all teams.
        worker: number of this worker among those of all teams.
    """

    plan: TeamPlan
    placement: Placement
    worker: int

    @classmethod
    def of_graph(cls, config: RunConfig, graph: TaskGraph) -> Team:
        """As the launcher says.

        Raises:
            ConfigError: the placement has several teams, and the launcher started one.
        """
        placement, rank = place(graph, config), int(os.environ.get("RANK", "0"))
        if not placement.separate:
            return cls(placement.teams[0], placement, rank)
        if TEAM not in os.environ:
            raise ConfigError(
                "the roles of this run have several teams, and this launcher starts one",
                where="placement",
                found=", ".join(f"{team.name} {team.devices}" for team in placement.teams),
                fix="start it with --launcher local or ray, or leave placement out",
            )
        return cls(placement[os.environ[TEAM]], placement, int(os.environ[WORKER]))

    @classmethod
    def of_all(cls, config: RunConfig) -> Team:
        """One team of all workers, for work without a graph: an actor, and where it draws."""
        plan = TeamPlan(ONLY_TEAM, (Role.ACTOR, Role.ROLLOUT), config.cluster.nproc, 0, config.actor.parallel, ())
        return cls(plan, Placement((plan,)), int(os.environ.get("RANK", "0")))

    def holds(self, role: Role) -> bool:
        """Is this model one of this team's?"""
        return role in self.plan.roles
