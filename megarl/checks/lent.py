"""Checks of a rollout team whose workers only send requests to servers, which run on the GPUs of these workers."""

from __future__ import annotations

from collections import Counter

from megarl.checks.checklist import Checklist
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.config.sglang import SGLangConfig
from megarl.dag.placement import Placement, TeamPlan, devices_key
from megarl.dag.shares import settings_of_workers
from megarl.launchers.bundles import lends, whole
from megarl.launchers.seats import seats
from megarl.rollout.sglang.gpus import most_servers
from megarl.system.errors import count


def workers_of_machines(config: RunConfig, placement: Placement, team: TeamPlan) -> list[int]:
    """Return the number of a team's workers on each machine, as the Ray launcher places them; empty when unknown."""
    apart = config.launch.slurm.teams
    if (nodes_of_team := apart.get(team.name)) is not None:
        return [] if team.devices % nodes_of_team.nodes else [team.devices // nodes_of_team.nodes] * nodes_of_team.nodes
    shared = [other for other in placement.teams if other.name not in apart]
    nodes = config.cluster.nnodes - sum(entry.nodes for entry in apart.values())
    workers = sum(other.devices for other in shared)
    if nodes < 1 or workers % nodes:
        return []
    places = [(f"{machine:06}", [str(gpu)]) for machine in range(nodes) for gpu in range(workers // nodes)]
    order = iter(seats(places, shared, {other.name: whole(config, other) for other in shared}))
    hosts = {other.name: [places[next(order)][0] for _ in range(other.devices)] for other in shared}
    return list(Counter(hosts[team.name]).values())


def check_lent(config: RunConfig, placement: Placement, team: TeamPlan, checks: Checklist) -> None:
    """Check that servers of a run on several machines run on the GPUs of workers that only send requests."""
    checks = checks.of("placement")
    servers, section = config.rollout.servers, config.rollout.servers_key
    if servers is None:
        return
    if not lends(config, team):
        checks.fail(
            f"placement.teams.{team.name}.roles",
            f"on {config.cluster.nnodes} machines servers are started on GPUs of workers that only send requests, but "
            f"the workers of the team {team.name} need their GPUs",
            found=", ".join(role.value for role in team.roles),
            allowed=f"[rollout], the actor's roles and rollout in one team, one machine, or {section}.urls",
            fix="give the rollout a team of its own",
        )
    elif servers.gpus is not None or servers.first_gpu_given:
        checks.fail(
            f"{section}.gpus" if servers.gpus is not None else f"{section}.extra_args",
            f"the team {team.name} may have other GPUs on each of its machines",
            found=servers.gpus or servers.extra_args,
            allowed="servers on the GPUs that the team's workers lend them",
            fix=f"set {section}.gpus=null, and remove --base-gpu-id",
        )
    elif config.cluster.device_memory_gb is not None:  # workers on CPUs have no devices for servers
        _check_room(config, servers, workers_of_machines(config, placement, team), team, checks)


def _check_room(
    config: RunConfig, servers: SGLangConfig, machines: list[int], team: TeamPlan, checks: Checklist
) -> None:
    """Check that the team's machines have enough GPUs for all servers. `machines`: the team's workers on each."""
    section, key = config.rollout.servers_key, devices_key(config, team)
    ranks, nnodes = servers.ranks, servers.nnodes
    needed, most = servers.servers * ranks, most_servers(max(1, ranks // nnodes), machines, nnodes)
    if not machines or servers.servers <= most or ranks % nnodes:
        return
    where = "one machine" if nnodes == 1 else f"{nnodes} machines"
    if not most:
        fitting = sorted([*machines, *[0] * nnodes], reverse=True)[nnodes - 1] * nnodes
        wider = nnodes < len(machines) and ranks <= team.devices and nnodes + 1
        checks.fail(
            f"{section}.tp_size",
            f"a server is on {where}, where the team {team.name} has {count(fitting, 'worker')} at most",
            found=servers.tp_size,
            allowed=f"at most {fitting}" if fitting else f"servers on {count(len(machines), 'machine')} at most",
            fix=f"lower {section}.{'tp_size, and start more servers' if fitting else 'nnodes'}"
            + (f", or spread a server over {section}.nnodes={wider} machines or more" if wider else ""),
        )
        return
    spread = "" if needed > team.devices else f", each on {where}, and have {' + '.join(map(str, machines))}"
    nodes_of_team, settings = config.launch.slurm.teams.get(team.name), None
    if needed > team.devices and nodes_of_team is None:
        settings = settings_of_workers(config, config.cluster.nproc - team.devices + needed, ranks)
    fix = f"set {section}.servers={most}, or give the team more devices, with cluster.nproc and cluster.nnodes"
    if settings is not None:
        fix = f"set {key}={needed} {settings}, or {section}.servers={most}"
    checks.fail(
        key,
        f"the workers of the team {team.name} lend their GPUs to {count(servers.servers, 'server')} of "
        f"{count(ranks, 'rank')}, which need {needed}{spread}",
        found=team.devices,
        allowed=f"{needed} or more, on several machines",
        fix=fix,
    )


def check_request_workers(config: RunConfig, placement: Placement, team: TeamPlan, checks: Checklist) -> None:
    """Check a team whose workers hold no model: they send requests to servers, which use the workers' GPUs."""
    checks = checks.of("placement")
    layout, servers, section = config.rollout.parallel, config.rollout.servers, config.rollout.servers_key
    key = devices_key(config, team)
    if layout is not None and layout != ParallelConfig():
        checks.warn(
            "rollout.parallel",
            f"this has no effect on servers: it groups the workers of the team {team.name}, which only send requests",
            found=layout.model_dump(exclude_defaults=True),
            fix=f"set rollout.parallel=null; {section}.tp_size splits the model of a server",
        )
    if config.cluster.device_memory_gb is None or servers is None or servers.colocated:
        return
    if servers.urls:
        fewer = _fewest(config, placement, team)
        if fewer is not None:
            checks.warn(
                key,
                f"under Ray the workers of the team {team.name} reserve {count(team.devices, 'GPU')}, and the servers "
                f"of {section}.urls are on others",
                found=team.devices,
                fix=f"set {key}={fewer} cluster.nproc={config.cluster.nproc - team.devices + fewer}, the fewest with "
                "equally many workers on every machine",
            )
        return
    used = servers.servers * servers.tp_size
    if used >= team.devices:
        return
    machines = workers_of_machines(config, placement, team)
    most = most_servers(max(1, servers.tp_size // servers.nnodes), machines, servers.nnodes)
    if most:
        more = f"set {section}.servers={most}" if most > servers.servers else f"change {section}.tp_size"
        checks.warn(
            f"{section}.servers",
            f"{team.devices - used} of the {count(team.devices, 'GPU')} that the workers of the team {team.name} lend "
            f"have no server",
            found=servers.servers,
            fix=f"{more}, or give the team fewer devices",
        )


def _fewest(config: RunConfig, placement: Placement, team: TeamPlan) -> int | None:
    """Return the smallest number of workers below the team's that makes whole replicas on these machines; None if there
    is none.
    """
    others, size = sum(other.devices for other in placement.teams) - team.devices, team.parallel.model_parallel_size
    nodes_of_team = config.launch.slurm.teams.get(team.name)
    for devices in range(size, team.devices, size):
        if (devices % nodes_of_team.nodes if nodes_of_team else (others + devices) % config.cluster.nnodes) == 0:
            return devices
    return None
