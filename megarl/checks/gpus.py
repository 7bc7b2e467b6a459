"""Number of GPUs that each machine of a run needs."""

from __future__ import annotations

from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement, devices_key
from megarl.dag.shares import USUAL_GPUS
from megarl.dag.stage import Role
from megarl.planning.step import occupied
from megarl.system.errors import count


def check_machine_gpus(config: RunConfig, placement: Placement, job: str, checks: Checklist) -> None:
    """Report the GPUs needed per machine for a GPU recipe; warn if machines usually have fewer."""
    checks = checks.of("machines")
    cluster = config.cluster
    if cluster.device_memory_gb is None or config.launch.slurm.teams:  # the teams' machines may be of several kinds
        return
    workers = sum(team.devices for team in placement.teams)
    servers, beside, refused, uneven = config.rollout.servers, 0, False, False
    if servers is not None:
        beside = occupied(config, placement) - workers if job != "sft" and not servers.urls else 0
        refused = bool(beside and placement.request_workers and cluster.nnodes > 1)
        uneven = bool(beside and servers.servers * servers.nnodes % cluster.nnodes)
    # Other checks report settings that servers refuse, and workers or servers that machines cannot share evenly.
    if refused or workers % cluster.nnodes or uneven:
        return
    here, lent = (workers + beside) // cluster.nnodes, beside // cluster.nnodes
    machines = f"{count(cluster.nnodes, 'machine')} of {count(here, 'GPU')}"
    parts = f"{here - lent} for workers, {lent} for servers beside them"
    if here <= _usual_gpus(config):
        checks.ok(f"{machines} ({parts})")
        return
    checks.warn(
        "cluster.nnodes",
        f"the run needs {machines} ({parts}), but machines usually have {USUAL_GPUS}",
        found=cluster.nnodes,
        fix=_more_machines(config, placement, workers, beside),
    )


def _usual_gpus(config: RunConfig) -> int:
    """Return the GPUs that a machine may have: the usual number, or a larger one that the recipe sets for Slurm or
    Kubernetes."""
    configured = (config.launch.slurm.gpus_per_node, config.launch.kubernetes.gpus_per_node)
    return max(USUAL_GPUS, *(number or 0 for number in configured))


def _more_machines(config: RunConfig, placement: Placement, workers: int, beside: int) -> str:
    """Describe a change after which machines with the usual number of GPUs are enough."""
    settings, servers = [], config.rollout.servers
    if beside and placement.request_workers:  # on several machines servers need GPUs of workers: add workers for them
        team = placement.home(Role.ROLLOUT)
        settings = [f"{devices_key(config, team)}={team.devices + beside}", f"cluster.nproc={workers + beside}"]
        workers, beside = workers + beside, 0
    even = [
        n
        for n in range(1, workers + 1)
        if workers % n == 0 and (servers is None or not beside or servers.servers * servers.nnodes % n == 0)
    ]
    # number of GPUs that must be on the same machine
    unit = servers.ranks_per_node if servers is not None and settings else 1
    fit = (n for n in even if (workers + beside) // n <= _usual_gpus(config) and (workers + beside) // n % unit == 0)
    nnodes = next(fit, None)
    if nnodes is None:
        key = f"{config.rollout.servers_key}.servers"
        return f"change cluster.nnodes and {key} together: every machine has equally many of both"
    return f"set {' '.join([*settings, f'cluster.nnodes={nnodes}'])}"
