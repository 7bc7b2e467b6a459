"""Machines of a run, and how many of its workers or GPUs each of them has."""

from __future__ import annotations

from megarl.config.run import RunConfig

#: GPUs of a machine, as a rule.
USUAL_GPUS = 8


def workers_of_machine(config: RunConfig) -> int:
    """Return the workers that a machine of this run may have: as many as the recipe says, and with GPUs no more than is
    usual."""
    cluster = config.cluster
    if cluster.device_memory_gb is None:
        return -(-cluster.nproc // cluster.nnodes)
    whole = cluster.nnodes > 1 and cluster.nproc % cluster.nnodes == 0
    return min(cluster.nproc // cluster.nnodes, USUAL_GPUS) if whole else USUAL_GPUS


def settings_of_workers(config: RunConfig, workers: int, unit: int = 1) -> str | None:
    """Return the overrides for a run of so many workers, its machines about as full as now; None: they fill no whole
    machines.

    Args:
        unit: workers of a machine are a multiple of it.
    """
    cluster, most = config.cluster, workers_of_machine(config)
    if config.launch.slurm.teams:  # their nodes are their own
        return f"cluster.nproc={workers}"
    room = USUAL_GPUS if cluster.device_memory_gb is not None else most
    even = [n for n in range(1, workers + 1) if workers % n == 0 and workers // n % unit == 0]
    nnodes = next((n for n in even if workers // n <= most), None)
    if cluster.nnodes == 1 and cluster.device_memory_gb is None:
        nnodes = 1
    elif cluster.nnodes in even and cluster.nnodes > 1 and workers // cluster.nnodes <= room:
        nnodes = cluster.nnodes
    elif nnodes is None or 2 * (workers // nnodes) <= min(most, workers):
        return None
    settings = {"cluster.nproc": (cluster.nproc, workers), "cluster.nnodes": (cluster.nnodes, nnodes)}
    return " ".join(f"{key}={new}" for key, (old, new) in settings.items() if new != old)
