"""Checks of teams: every role has devices, and the launcher can start the teams."""

from __future__ import annotations

from megarl.checks.checklist import Checklist
from megarl.checks.lent import check_lent, check_request_workers
from megarl.config.run import RunConfig
from megarl.config.training import EngineConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement, devices_key, place, together
from megarl.dag.stage import Role
from megarl.launchers.bundles import lends
from megarl.rollout.families import family_of
from megarl.system.errors import ConfigError, count
from megarl.system.offload_schedule import PARAMETERS, PARTS


def check_placement(
    config: RunConfig, graph: TaskGraph | None, job: str, launcher: str | None, checks: Checklist
) -> Placement | None:
    """Return the teams of `job`; None (recorded) when there is no graph, or it cannot be placed. Only `megarl train`
    has several teams. Other commands have one team of all workers with the actor's layout; `sft` generates nothing.
    """
    checks = checks.of("placement")
    _check_parts(config, checks)
    if job != "train":
        roles = (Role.ACTOR,) if job == "sft" else (Role.ACTOR, Role.ROLLOUT, *extra_models(config, job))
        return together(config, roles)
    if config.placement.measured is not None and config.placement.auto != "measured":
        checks.warn(
            "placement.measured",
            "the measurements of this run are not used",
            found=config.placement.measured,
            fix="set placement.auto=measured, or remove this key",
        )
    if graph is None:  # the graph's error is already recorded
        return None if config.placement.has_several_teams else together(config)
    try:
        placement = place(graph, config)
    except ConfigError as error:
        if not checks.failed(error.where):
            checks.from_error(error)
        return None
    if placement.separate:
        checks.ok(", ".join(f"{team.name} {count(team.devices, 'worker')}" for team in placement.teams))
        _check_launcher(placement, launcher, checks)
        _check_servers(config, placement, checks)
        _check_rollout(config, placement, checks)
        _check_offload(config, placement, checks)
    return placement


def extra_models(config: RunConfig, job: str) -> frozenset[Role]:
    """Return the models, in addition to the policy, that a job without a task graph uses."""
    return frozenset({Role.REWARD_MODEL} if job == "eval" and config.reward.of_model is not None else ())


def _check_parts(config: RunConfig, checks: Checklist) -> None:
    """Check that trained models other than the policy offload their parameters only together with gradients and
    optimizer state."""
    engines = {"critic": config.critic.engine}
    engines |= {f"models.{name}": further.engine for name, further in config.models.items() if further.train}
    for section, engine in engines.items():
        if PARAMETERS in engine.offloaded and len(engine.offloaded) < len(PARTS):
            checks.fail(
                f"{section}.engine.offload",
                "the optimizer's state may share the memory of the parameters, so parameters leave only together with "
                "optimizer and gradients",
                found=engine.offload,
                allowed="true, false, [gradients], [optimizer], [gradients, optimizer]",
                fix=f"set {section}.engine.offload=true",
            )


def _check_launcher(placement: Placement, launcher: str | None, checks: Checklist) -> None:
    if launcher == "torchrun":
        checks.fail(
            "placement",
            f"torchrun starts one world of workers, but this recipe has {len(placement.teams)}, one per team",
            found=f"--launcher torchrun with the teams {', '.join(team.name for team in placement.teams)}",
            allowed="--launcher ray, or --launcher local on one machine",
            fix="use --launcher ray, or one team: placement='!replace {}'",
        )


def _check_servers(config: RunConfig, placement: Placement, checks: Checklist) -> None:
    """Check that colocated servers are in the actor's team and on its devices."""
    actor, servers = placement.of_role(Role.ACTOR), config.rollout.servers
    if servers is None or not servers.colocated or actor is None:
        return
    section = config.rollout.servers_key
    key = f"{section}.colocated"
    generating = placement.of_role(Role.ROLLOUT)
    if generating is not None and generating is not actor:
        only = generating.roles == (Role.ROLLOUT,)
        whole = f", with its devices, and leave the team {generating.name} out" if only else ""
        checks.fail(
            key,
            "colocated servers take turns with the actor, but the rollout is in another team",
            found=True,
            allowed="false, or true with actor and rollout in one team",
            fix=f"set {key}=false, or move rollout from placement.teams.{generating.name}.roles to "
            f"placement.teams.{actor.name}.roles{whole}",
        )
    elif servers.servers * servers.ranks > actor.devices:
        checks.fail(
            f"{section}.servers",
            f"the servers have {count(servers.servers * servers.ranks, 'rank')} on the devices of the team "
            f"{actor.name}, which has only {actor.devices}",
            found=servers.servers,
            allowed=f"servers * tp_size of at most {actor.devices}",
            fix=f"lower {section}.servers or tp_size, or raise {devices_key(config, actor)}",
        )


def _check_rollout(config: RunConfig, placement: Placement, checks: Checklist) -> None:
    """Check that a rollout engine outside of the actor's team can receive the actor's weights."""
    team, servers = placement.of_role(Role.ROLLOUT), config.rollout.servers
    if team is None or Role.ACTOR in team.roles:
        return
    family_of(config).check_receiver(config, team, checks)
    if servers is not None and config.cluster.nnodes > 1 and not servers.urls:
        check_lent(config, placement, team, checks)
    if lends(config, team):
        check_request_workers(config, placement, team, checks)


def _check_offload(config: RunConfig, placement: Placement, checks: Checklist) -> None:
    """Warn of offloading in a team with one role, where it frees memory for no other model, and check the settings that
    streamed optimizers need."""
    for name, further in config.models.items():
        _check_streamed(f"models.{name}.engine", further.engine, checks)
    for role, engine in ((Role.ACTOR, config.actor.engine), (Role.CRITIC, config.critic.engine)):
        _check_streamed(f"{role.value}.engine", engine, checks)
        team = placement.of_role(role)
        if team is not None and team.roles == (role,) and engine.offload and not engine.stream_optimizer:
            checks.warn(
                f"{role.value}.engine.offload",
                f"nothing takes turns with the {role.value} in the team {team.name}: moving its state to host memory "
                "and back takes time without making room for another model",
                found=engine.offload,
                fix=f"set {role.value}.engine.offload=false",
            )


def _check_streamed(section: str, engine: EngineConfig, checks: Checklist) -> None:
    """Check the settings that `stream_optimizer` needs, which moves the optimizer's state through the GPU in pieces."""
    if not engine.stream_optimizer:
        return
    offload = "true" if engine.offloaded == frozenset(PARTS) else str(engine.offload).lower()
    for name, value, allowed in (
        ("offload", offload, "true"),
        ("distributed_optimizer", str(engine.distributed_optimizer).lower(), "true"),
        ("exp_avg_dtype", engine.exp_avg_dtype, "fp32"),
    ):
        if value != allowed:
            checks.fail(
                f"{section}.{name}",
                f"{section}.stream_optimizer moves a distributed optimizer's float32 state between host and GPU",
                found=value,
                allowed=allowed,
                fix=f"set {section}.{name}={allowed}, or {section}.stream_optimizer=false",
            )
