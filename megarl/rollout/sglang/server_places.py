"""Checks of the GPUs on which servers run: separate GPUs, or the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.run import RunConfig
from megarl.system.errors import count
from megarl.system.offload_schedule import OPTIMIZER
from megarl.system.processes import nvidia_devices

if TYPE_CHECKING:
    from megarl.checks.checklist import Checklist

NAME = "servers"


def check_gpus(config: RunConfig, request_workers: int, checks: Checklist) -> None:
    """Check that servers have separate GPUs, or share the trainer's with `rollout.sglang.colocated`.

    Args:
        request_workers: number of workers that only send requests, and on whose GPUs the servers run.
    """
    checks = checks.of(NAME)
    servers, cluster = config.rollout.sglang, config.cluster
    workers, here = (
        (cluster.nproc - request_workers) // cluster.nnodes,
        servers.servers * servers.nnodes // cluster.nnodes,
    )
    # On several machines, servers run only on the GPUs of workers that just send requests, if there are such workers.
    if servers.urls or servers.first_gpu_given or (request_workers and cluster.nnodes > 1):
        return
    needed, key = max(1, here) * servers.ranks_per_node, "rollout.sglang.gpus"
    if servers.gpus is None:
        _check_room(needed, workers, servers.colocated, checks)
    elif len(set(servers.gpus)) < len(servers.gpus):
        checks.warn(key, "ranks of servers share a GPU", found=servers.gpus, fix="list every GPU once")
    elif not servers.colocated and min(servers.gpus, default=workers) < workers:
        checks.warn(
            key,
            f"servers share GPUs with the trainer, which uses the first {workers} of a machine, and take most of "
            "their memory",
            found=servers.gpus,
            fix="set rollout.sglang.colocated=true, or, if machines have that many GPUs, "
            f"{key}=[{','.join(map(str, range(workers, workers + needed)))}]",
        )


def _check_room(needed: int, workers: int, colocated: bool, checks: Checklist) -> None:
    """Check that this machine has enough GPUs for servers without `rollout.sglang.gpus`."""
    present = nvidia_devices()
    if not present or needed <= (workers if colocated else present - workers):
        return
    checks.fail(
        "rollout.sglang.gpus",
        f"the servers of a machine need {count(needed, 'GPU')}, but it has {present}, of which the trainer uses "
        f"{workers}",
        found=None,
        allowed=f"servers on the trainer's {workers}" if colocated else "servers on GPUs that are not the trainer's",
        fix="lower rollout.sglang.servers or tp_size"
        + ("" if colocated else ", lower cluster.nproc, or share them: rollout.sglang.colocated=true"),
    )


def check_colocated(config: RunConfig, checks: Checklist) -> None:
    """Check that colocated servers fit on the trainer's GPUs, one server rank per GPU, and leave memory free."""
    checks = checks.of(NAME)
    servers = config.rollout.sglang
    if not servers.colocated:
        return
    key = "rollout.sglang.colocated"
    if servers.urls:
        checks.fail(
            key,
            "colocated servers need SGLang's memory saver, which servers that already run may lack",
            found=True,
            allowed="false with rollout.sglang.urls",
            fix=f"set {key}=false, or rollout.sglang.urls=[]",
        )
    nnodes, gpus = config.cluster.nnodes, config.cluster.device_memory_gb is not None
    workers, here = config.cluster.nproc // nnodes, servers.servers * servers.nnodes // nnodes
    ranks = max(1, servers.ranks_per_node)
    # With shards each rank of a server needs a trainer rank, also on a CPU and on GPUs that the recipe chooses.
    counted = config.sends_shards or (gpus and servers.gpus is None and not servers.first_gpu_given)
    if counted and here * ranks > workers:
        most = workers // ranks * nnodes // servers.nnodes
        checks.fail(
            "rollout.sglang.servers",
            f"{count(here, 'server')} of {count(ranks, 'rank')} cannot share the GPUs of "
            f"{count(workers, 'worker')} on a machine",
            found=servers.servers,
            allowed=f"servers * tp_size up to {workers * nnodes}",
            fix=f"set rollout.sglang.servers={most}"
            if most
            else f"set rollout.sglang.tp_size={workers * servers.nnodes} "
            f"rollout.sglang.servers={nnodes // servers.nnodes}, or a lower tp_size",
        )
    # no warning if the optimizer is offloaded, or if the check of memory covers this (GPUs with a memory fraction)
    if not (OPTIMIZER in config.actor.engine.offloaded or (gpus and servers.memory_fraction)):
        checks.warn(
            key,
            "the optimizer state stays on the devices while the servers generate there",
            fix="set actor.engine.offload=true",
        )
    # if the GPUs' size is known, the check of memory proposes a fraction
    if servers.memory_fraction is None and not gpus:
        checks.warn(
            key,
            "on GPUs a server takes most of the memory unless it is limited",
            fix="set rollout.sglang.memory_fraction to the share that the actor's parameters leave free",
        )
