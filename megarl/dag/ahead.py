"""What a graph and its teams have to be like for the rollout's team to run ahead of the actor's.

    rollout's team   draw t + 1 -------->  draw t + 2 -------->
                                \\  weights t /
    actor's team     train t ---------->  train t + 1 ------->

Within a step everything goes from the rollout's team to others and nothing back to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement

KEY = "async.max_staleness"


def refuse_ahead(config: RunConfig, placement: Placement) -> None:
    """Refuse a staleness that these teams cannot have.

    Raises:
        ConfigError: says why.
    """
    lag = config.async_.max_staleness
    if lag == 0:
        return
    _refuse_settings(config, lag)
    team = placement.of_role(Role.ROLLOUT)
    assert team is not None, "every run draws samples"
    if Role.ACTOR in team.roles:
        raise ConfigError(
            "a step is drawn while the one before it is trained, and the rollout takes turns with the actor in the "
            f"team {team.name}",
            where=KEY,
            found=lag,
            allowed="0, or 1 with the rollout in a team of its own",
            fix=f"name the teams in placement.teams, with rollout in one without the actor, or set {KEY}=0",
        )
    back = placement.taken(team.name)
    if back:
        what = "; ".join(f"{', '.join(one.fields)} of {one.node} in {one.giver}" for one in back)
        raise ConfigError(
            f"the team {team.name} draws a step before other teams work on it, and takes from them what it needs in "
            "that step",
            where=KEY,
            found=what,
            allowed="0, or a team that takes nothing",
            fix=f"put the rollout into a team without these other roles, or set {KEY}=0",
        )
    samples = {one.samples for one in placement.given_by(team.name)}
    if len(samples) > 1:
        raise ConfigError(
            f"the team {team.name} hands over samples of several nodes, and a checkpoint keeps those of one for the "
            "next step",
            where=KEY,
            found=", ".join(sorted(samples)),
            allowed="0, or a pipeline whose nodes in this team resample once",
            fix=f"set {KEY}=0",
        )


def _refuse_settings(config: RunConfig, lag: int) -> None:
    if lag > 1:
        raise ConfigError(
            "samples of one version of the weights are drawn while the next one is trained; more would need copies of "
            "older weights, which are not kept",
            where=KEY,
            found=lag,
            allowed="0 or 1",
            fix=f"set {KEY}=1",
        )
    if config.algorithm.dynamic_sampling.enabled:
        raise ConfigError(
            "dynamic sampling asks for more samples of a step until there are enough, with the weights of that step, "
            "and these are gone once the next ones have come",
            where=KEY,
            found=lag,
            allowed="0 with algorithm.dynamic_sampling.enabled=true",
            fix=f"set {KEY}=0, or algorithm.dynamic_sampling.enabled=false",
        )
    if config.rollout.stale_steps:
        raise ConfigError(
            "both make samples older than they have to be: rollout.stale_steps keeps old weights for experiments "
            "in a rollout that takes turns with the actor",
            where="rollout.stale_steps",
            found=config.rollout.stale_steps,
            allowed=f"0 with {KEY} above 0",
            fix="set rollout.stale_steps=0",
        )
