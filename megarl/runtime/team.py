"""Which of the run's teams this worker is in (`megarl.dag.placement`), and its way to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.dag.placement import Placement, TeamPlan, together
from megarl.dag.stage import Role

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.disaggregated.buffer.client import StoreClient
    from megarl.training.parallel import Layout


@dataclass(frozen=True)
class OwnTeam:
    """The team of this worker, among all of the run.

    Attributes:
        store: what the teams exchange goes through it; None: there is only this team.
        restarts: how often this team has begun again because a process of it died.
        begins_again: it may (`megarl.dag.placement.begins_again`).
        finished: with `restarts`, the last step that was over then: it begins after it.
    """

    plan: TeamPlan
    placement: Placement
    store: StoreClient | None = None
    restarts: int = 0
    finished: int = 0
    begins_again: bool = False

    @classmethod
    def of_all(cls, config: RunConfig) -> OwnTeam:
        """One team of all workers, for work without a graph."""
        placement = together(config)
        return cls(placement.teams[0], placement)

    @property
    def others(self) -> list[TeamPlan]:
        """All teams but this one."""
        return [team for team in self.placement.teams if team.name != self.plan.name]

    @property
    def leads(self) -> bool:
        """It is the team of the actor, which decides where the run starts and keeps its record."""
        return self.holds(Role.ACTOR)

    def holds(self, role: Role) -> bool:
        """Is this model one of this team's?"""
        return role in self.plan.roles

    def of(self, role: Role) -> str:
        """Name of the team that holds this model, which the run has."""
        team = self.placement.of_role(role)
        assert team is not None, f"no team holds the {role.value}"
        return team.name

    def queues(self) -> dict[str, int]:
        """Groups of samples that wait for a team, by name (`buffer.core.Core.queues`); one rank calls this."""
        return {} if self.store is None else self.store.queues()

    # -- mail: JSON, from the first rank of a team to all ranks of others ----------------------------------------------

    def post(self, layout: Layout, name: str, value: Any) -> None:
        """Leave `value` under a new name for other teams, where there are any; all ranks of this team call it."""
        if self.store is not None and layout.rank == 0:
            self.store.post(name, value)

    def read(self, name: str) -> Any:
        """Wait for what another team has posted, and return it; only where there are several teams."""
        assert self.store is not None, "with one team nobody posts"
        return self.store.read(name)
