"""Reserves a run's devices in a Ray cluster.

    no servers of its own     one bundle per worker: a GPU where the nodes have any, and a share of their CPUs
    with servers on GPUs      one bundle per machine: its workers', and the GPUs of the servers that are started there

Ray does not manage the servers, which a worker starts. Their GPUs are reserved so that Ray gives them to no other
process. Servers of a rollout team that only sends requests use its workers' GPUs first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.config.run import RunConfig
from megarl.dag.placement import TeamPlan
from megarl.dag.stage import Role
from megarl.launchers.seats import resource
from megarl.system.errors import UnavailableError
from megarl.system.processes import has_nvidia_device

Bundle = dict[str, float]
#: Amount that a bundle requests of the Ray resource that marks its team's nodes, so that Ray places the bundle there.
#: It is small, so that the resource does not limit the number of bundles.
_SHARE = 0.001


@dataclass(frozen=True)
class Reservation:
    """The bundles of one placement group.

    Attributes:
        bundles: resources of each bundle.
        strategy: strategy of the placement group.
        worker: resources that each worker takes of its bundle.
        places: index of each worker's bundle.
        servers: GPUs of each bundle that are reserved for servers, in addition to the workers' GPUs.
    """

    bundles: list[Bundle]
    strategy: str
    worker: Bundle
    places: list[int]
    servers: int = 0


MEETING = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables of the rendezvous, which jobs set themselves."""


def lends(config: RunConfig, team: TeamPlan) -> bool:
    """Return whether the team's workers leave their GPUs to servers: teams with only the rollout role send requests."""
    return config.rollout.servers is not None and team.roles == (Role.ROLLOUT,)


def whole(config: RunConfig, team: TeamPlan) -> int:
    """Return how many consecutive workers of a team must be on one machine: a tensor and context parallel group, or the
    workers that lend their GPUs to one server (or to its part on a machine).
    """
    servers, workers = config.rollout.servers, team.parallel.tp * team.parallel.cp
    return max(workers, servers.ranks_per_node) if servers is not None and lends(config, team) else workers


def chooses_gpus(config: RunConfig) -> bool:
    """Return whether the run starts servers on GPUs other than the trainer's, and the recipe does not choose them."""
    servers = config.rollout.servers
    if servers is None or servers.urls or servers.colocated:
        return False
    return servers.gpus is None and not servers.first_gpu_given


def reserve(config: RunConfig, teams: Sequence[TeamPlan], nodes: Sequence[Mapping[str, float]]) -> Reservation:
    """Return the reservation to request from Ray, whose nodes have the resources `nodes`. Raise UnavailableError if
    there are too few GPUs, or if the run has both teams with their own nodes and servers with their own GPUs.
    """
    cluster = config.cluster
    most = max(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)))
    used = [most] if cluster.nnodes == 1 else nodes
    gpus, cpus = (sum(node.get(name, 0.0) for node in used) for name in ("GPU", "CPU"))
    on_gpus = bool(gpus) or has_nvidia_device()
    rollout = next((team for team in teams if Role.ROLLOUT in team.roles), None)
    lent = rollout.devices if rollout is not None and lends(config, rollout) else 0
    extra = server_gpus(config, lent) if on_gpus and rollout is not None else 0
    workers = cluster.nproc // cluster.nnodes
    here = workers + extra
    fitting = [node for node in used if node.get("GPU", 0.0) >= here]
    if on_gpus and (gpus < cluster.nproc or (extra and len(fitting) < cluster.nnodes)):
        raise _too_few(config, teams, nodes, extra)
    share = cpus / cluster.nproc
    if on_gpus and cluster.nnodes > 1:  # no worker runs on nodes without GPUs, such as Ray's head node
        full = [(node, workers if extra else node["GPU"]) for node in (fitting if extra else used) if node.get("GPU")]
        share = min(node.get("CPU", 0.0) / number for node, number in full)
    worker = {"CPU": min(1.0, int(100 * share) / 100)} | ({"GPU": 1.0} if on_gpus else {})
    separate = apart(config, nodes)
    if not extra:
        strategy = "STRICT_PACK" if cluster.nnodes == 1 else "PACK"
        names = [team.name if team.name in separate else "" for team in teams for _ in range(team.devices)]
        bundles = [worker | ({resource(name): _SHARE} if separate else {}) for name in names]
        return Reservation(bundles, strategy, worker, list(range(cluster.nproc)))
    if separate:
        raise UnavailableError(
            "servers with their own GPUs cannot be combined with teams that have their own nodes",
            where="launch.slurm.teams",
            found=f"{extra} GPUs per node for SGLang servers",
            fix="use a rollout-only team with as many workers as the servers have GPUs, which lends them its GPUs; or "
            f"choose the servers' GPUs with {config.rollout.servers_key}.gpus",
        )
    machine = {"CPU": round(workers * worker["CPU"], 2), "GPU": float(here)}
    places = [number // workers for number in range(cluster.nproc)]
    return Reservation([machine] * cluster.nnodes, "STRICT_SPREAD", worker, places, extra)


def apart(config: RunConfig, nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the teams that have their own nodes in this Ray cluster (launch.slurm.teams)."""
    return [team for team in config.launch.slurm.teams if any(resource(team) in node for node in nodes)]


def server_gpus(config: RunConfig, lent: int) -> int:
    """Return how many GPUs a machine's servers need in addition to the `lent` GPUs, which workers leave to them. On
    several machines the lent GPUs are enough for all servers; a check of the recipe ensures it. Return 0 if the recipe
    chooses the servers' GPUs.
    """
    servers, machines = config.rollout.servers, config.cluster.nnodes
    if servers is None or not chooses_gpus(config) or (lent and machines > 1):
        return 0
    return max(0, servers.servers * servers.ranks // machines - lent)


def gpus_of_a_node(config: RunConfig, job: str) -> int:
    """Return the GPUs per node of workers and of servers with their own GPUs. `job`: train, eval (one team), sft (no
    servers).
    """
    workers = config.cluster.nproc // config.cluster.nnodes
    if job == "sft":
        return workers
    named = None if config.rollout.servers is None else config.rollout.servers.gpus
    lent = config.placement.request_workers if job == "train" else 0
    return max(workers + server_gpus(config, lent), 1 + max(named or [-1]))


def _too_few(
    config: RunConfig, teams: Sequence[TeamPlan], nodes: Sequence[Mapping[str, float]], extra: int
) -> UnavailableError:
    """Return the error that lists the GPUs that each team needs, the GPUs of each node, and how many are missing."""
    cluster = config.cluster
    machines, have = cluster.nnodes, sorted((int(node.get("GPU", 0)) for node in nodes), reverse=True)
    here = cluster.nproc // machines + extra
    needed = [f"{team.name} {team.devices}" + (" (lent to servers)" if lends(config, team) else "") for team in teams]
    if extra:
        needed.append(f"SGLang servers {extra * machines}")
    if machines == 1:
        lack, missing, allowed = "no node of the Ray cluster has that many GPUs", here - have[0], f"at most {have[0]}"
        fix = ["set cluster.nproc, or cluster.nnodes to the number of nodes that should share the work"]
    else:
        lack, missing, allowed = "the Ray cluster has too few GPUs", cluster.nproc - sum(have), f"at most {sum(have)}"
        fix = ["set cluster.nproc, or add nodes to the Ray cluster"]
    if not have[0]:
        fix.append("let Ray see the GPUs of its nodes: CUDA_VISIBLE_DEVICES, or ray start --num-gpus")
    if extra:
        fix.append(
            f"lower {config.rollout.servers_key}.servers or tp_size, or share GPUs: "
            f"{config.rollout.servers_key}.colocated=true"
        )
        if machines > 1:
            most = [*have, *[0] * machines][:machines]
            missing, allowed = sum(max(0, here - gpus) for gpus in most), f"{machines} nodes of {here} GPUs"
    return UnavailableError(
        f"{lack}: {missing} missing",
        where="cluster.nproc",
        found=f"{' + '.join(needed)} = {cluster.nproc + extra * machines}; nodes have {', '.join(map(str, have))}",
        allowed=f"{allowed}, one per worker{' and one per rank of a server' if extra else ''}",
        fix="; ".join(fix),
    )
