"""The recipe's section `placement`: which roles share devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from megarl.config.base import Section

_TEAM_RESTARTS = 3  # of a run with several teams

#: Roles that hold a model, which a team can be given.
TeamRole = Literal["actor", "critic", "reference", "teacher", "reward_model", "rollout"]


class TeamConfig(Section):
    """The workers that form one torch.distributed world with one layout."""

    roles: list[TeamRole] = Field(min_length=1, description="models that it holds")
    devices: PositiveInt = Field(description="workers, one per device")


class PlacementConfig(Section):
    """The assignment of roles to devices. Without teams all roles take turns on all devices."""

    auto: Literal["even", "param_aware", "measured"] | None = Field(
        None,
        description="a team for the actor with the rollout and one for every other model, which share cluster.nproc in "
        "whole replicas. even: about equally; param_aware: by parameters times passes over them; measured: by what an "
        "earlier run has measured; null: as teams says",
    )
    measured: str | None = Field(
        None,
        description="for auto=measured: the folder of a run of this recipe, whatever its placement; counts seconds of "
        "each node times workers of its team, medians of the steps after the first two",
    )
    teams: dict[str, TeamConfig] = Field(
        default_factory=dict,
        description="by name; their devices add up to cluster.nproc. Every role of the recipe is in one of them. "
        "Several teams run under Ray",
    )
    share: Literal["dealt", "tokens"] = Field(
        "dealt",
        description="how whole groups are shared by the replicas of a team. dealt: round-robin; tokens: equally many "
        "groups of every mini-batch each, tokens as even as possible. A mini-batch holds the same prompts either way. "
        "Replicas that generate their own samples exchange them",
    )
    spill: bool = Field(
        False,
        description="a Ray that the run starts moves samples between teams to disk when shared memory is full; false: "
        "they have to fit into it. On a Ray cluster of your own its settings count",
    )

    restarts: int = Field(
        3,
        ge=0,
        description="restarts of a reference, teacher or reward model team within a run when one of its processes "
        "dies; 0: its death ends the attempt, as with other teams (cluster.max_restarts)",
    )

    @property
    def default_max_restarts(self) -> int:
        """`cluster.max_restarts` where the recipe does not set it."""
        return _TEAM_RESTARTS if len(self.teams) > 1 or self.auto is not None else 0

    @property
    def asks_for_teams(self) -> bool:
        """Whether the recipe asks for several teams."""
        return bool(self.teams) or self.auto is not None

    @property
    def asking(self) -> int:
        """Number of workers in a team that has only the rollout: with servers they hold no model and only send
        requests.
        """
        return sum(team.devices for team in self.teams.values() if team.roles == ["rollout"])
