"""Checks of teams: that every role has its devices, and that something can start them."""

from __future__ import annotations

from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement, place, together
from megarl.errors import ConfigError, count


def check_placement(
    config: RunConfig, graph: TaskGraph | None, job: str, launcher: str | None, checks: Checklist
) -> Placement | None:
    """The teams of `job`, None when they are not known: there is no graph, or it cannot be placed, which is noted.

    Only `megarl train` has several teams. Other commands have one of all workers, with the actor's layout.
    """
    if job != "train":
        return together(config)
    if graph is None:  # what is wrong with it is noted
        return None if config.placement.asks_for_teams else together(config)
    try:
        found = place(graph, config)
    except ConfigError as error:
        if not checks.failed(error.where):
            checks.from_error("placement", error)
        return None
    if found.separate:
        checks.ok("placement", ", ".join(f"{team.name} {count(team.devices, 'worker')}" for team in found.teams))
        _check_launcher(found, launcher, checks)
    return found


def _check_launcher(placement: Placement, launcher: str | None, checks: Checklist) -> None:
    if launcher == "torchrun":
        checks.fail(
            "placement",
            "placement",
            f"torchrun starts one world of workers, and this recipe has {len(placement.teams)}, one per team",
            found=f"--launcher torchrun with the teams {', '.join(team.name for team in placement.teams)}",
            allowed="--launcher ray, or --launcher local on one machine",
            fix="use --launcher ray, or one team: placement.teams={} placement.auto=null",
        )
