"""The recipe's section `placement`: which roles share devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from megarl.config.base import Section
from megarl.config.models import FreeName

_TEAM_RESTARTS = 3  # default restarts of a run with several teams

#: Roles that hold a model and that `placement.teams` can assign to a team.
TeamRole = Literal["actor", "critic", "reference", "teacher", "reward_model", "rollout"]


class TeamConfig(Section):
    """Workers that form one torch.distributed world with one layout."""

    roles: list[TeamRole | FreeName] = Field(
        min_length=1, description="roles whose models the team holds, and names of `models`"
    )
    devices: PositiveInt = Field(description="number of workers, one per device")


class PlacementConfig(Section):
    """The assignment of roles to devices. Without teams all roles take turns on all devices."""

    auto: Literal["even", "param_aware", "measured"] | None = Field(
        None,
        description="make the teams automatically: one for actor and rollout and one for each other model share "
        "cluster.nproc in whole replicas. even: about equally; param_aware: by parameters times passes over them; "
        "measured: by the times of an earlier run; null: use `teams`",
    )
    measured: str | None = Field(
        None,
        description="for auto=measured: folder of a run of this recipe, in any placement. The teams are weighted by "
        "seconds of each node times workers of its team: medians without the first two steps",
    )
    teams: dict[str, TeamConfig] = Field(
        default_factory=dict,
        description="teams by name. Their devices add up to cluster.nproc, and every role of the recipe is in one "
        "team; a further model (`models`) that no team names is in the actor's. Several teams run under Ray",
    )
    share: Literal["dealt", "tokens"] = Field(
        "dealt",
        description="how the replicas of a team share whole prompt groups. dealt: round-robin; tokens: equally many "
        "groups of every mini-batch, with the token counts as even as possible. The prompts of a mini-batch do not "
        "change; replicas that generate exchange samples",
    )
    spill: bool = Field(
        False,
        description="let Ray move samples between teams to disk when shared memory is full; false: samples must fit "
        "in shared memory. Only for a Ray cluster that the run starts",
    )

    restarts: int = Field(
        3,
        ge=0,
        description="restarts per run of a reference, teacher or reward model team that loses a process; 0: its loss "
        "ends the attempt, as with other teams (cluster.max_restarts)",
    )

    @property
    def default_max_restarts(self) -> int:
        """Value of `cluster.max_restarts` when the recipe does not set it."""
        return _TEAM_RESTARTS if len(self.teams) > 1 or self.auto is not None else 0

    @property
    def has_several_teams(self) -> bool:
        """Whether the recipe names teams, or lets megarl choose them."""
        return bool(self.teams) or self.auto is not None

    @property
    def request_workers(self) -> int:
        """Number of workers in the team that has only the rollout; with servers they only send requests."""
        return sum(team.devices for team in self.teams.values() if team.roles == ["rollout"])
