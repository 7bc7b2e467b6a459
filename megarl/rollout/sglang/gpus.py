"""The assignment of a machine's GPUs to servers.

    machine    0  1  2  3  4  5  6  7
    trainer    =========== (workers, in the order of their ranks)
    servers                =========== separate: the next GPUs, or GPUs that the launcher has reserved for servers
               ===========             colocated: the trainer's GPUs

A GPU's name is its number on the machine or its UUID, as in CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config.sglang import SGLangConfig
from megarl.system.errors import ConfigError

#: Environment variable of the Ray launcher, whose workers see only their own GPU: the GPUs of this machine's workers.
#: Workers that only send requests are left out, because servers run on their GPUs.
TRAINER_GPUS = "MEGARL_TRAINER_GPUS"
#: Environment variable of the Ray launcher: the GPUs of this machine that are reserved for its servers.
SERVER_GPUS = "MEGARL_SERVER_GPUS"


def place_servers(servers: int, ranks: int, workers: Sequence[int], nnodes: int = 1) -> list[list[tuple[int, int]]]:
    """Return the (server, node) pairs of each machine; the servers are spread evenly over machines with equally many
    workers.

    Args:
        ranks: number of a server's ranks, and so of its GPUs, on one machine.
        workers: number of workers on each machine, in the team that starts the servers. If the servers run on the
            workers' GPUs, each server is placed where most of these GPUs are free.
        nnodes: number of machines of a server, at most `len(workers)`.
    """
    left = list(workers)
    places = []
    for _ in range(servers):
        machines = sorted(sorted(range(len(left)), key=lambda m: -left[m])[:nnodes])
        for machine in machines:
            left[machine] -= ranks
        places.append(machines)
    nodes: list[list[tuple[int, int]]] = [[] for _ in workers]
    for server, machines in enumerate(sorted(places)):
        for node, machine in enumerate(machines):
            nodes[machine].append((server, node))
    return nodes


def most_servers(ranks: int, workers: Sequence[int], nnodes: int = 1) -> int:
    """Return how many servers fit on the GPUs of workers that only send requests; arguments as in `place_servers`."""
    places = [number // ranks for number in workers]
    return max(n for n in range(sum(places) // nnodes + 1) if sum(min(place, n) for place in places) >= n * nnodes)


def server_gpus(
    config: SGLangConfig, servers: int, local: int, workers: int, environment: Mapping[str, str], present: int
) -> tuple[str, ...] | None:
    """Return the names of the GPUs that a server sees, the GPUs of its ranks first; None: all that this process sees.

    A colocated server sees all of the trainer's GPUs, because it maps memory of ranks on each of them.

    Args:
        servers: number of servers that have a process on this machine.
        local: index of the server among the servers of this machine.
        workers: number of trainer ranks on this machine.
        present: number of GPUs of this machine.

    Raises:
        ConfigError: this machine has too few GPUs.
    """
    if config.gpus is None and (not present or config.first_gpu_given):
        return None
    trainer, rest = _split(workers, environment, present)
    pool = trainer if config.colocated else rest
    if config.gpus is not None:
        pool = [str(gpu) for gpu in config.gpus]
    ranks = config.ranks_per_node
    if len(pool) < servers * ranks:
        raise _too_few(config, servers * ranks, trainer, rest)
    others = (*pool, *trainer) if config.colocated else ()
    return tuple(dict.fromkeys((*pool[local * ranks : (local + 1) * ranks], *others)))


def _too_few(config: SGLangConfig, wanted: int, trainer: list[str], rest: list[str]) -> ConfigError:
    fix = "lower rollout.sglang.servers or rollout.sglang.tp_size"
    if config.gpus is not None:
        reason, fix = f"the recipe lists {len(config.gpus)}", f"list more GPUs, or {fix}"
    elif config.colocated:
        reason = f"the trainer, whose GPUs they share, has {len(trainer)}"
        fix = f"{fix}, or raise cluster.nproc"
    else:
        reason = f"{len(rest)} are free: this process sees {len(trainer) + len(rest)}, of which the trainer uses "
        reason += str(len(trainer))
        fix = f"{fix}, lower cluster.nproc, or share the trainer's GPUs: rollout.sglang.colocated=true"
    return ConfigError(
        f"the servers of this machine need {wanted} GPUs, but {reason}",
        where="rollout.sglang.gpus",
        found=config.gpus,
        allowed="one GPU per rank of a server",
        fix=fix,
    )


def _split(workers: int, environment: Mapping[str, str], present: int) -> tuple[list[str], list[str]]:
    """Return the names of this machine's GPUs: the trainer's, and the rest, for servers."""
    if TRAINER_GPUS in environment:
        trainer = _names(environment[TRAINER_GPUS])
        everything = [str(gpu) for gpu in range(present)]
    else:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        everything = [str(gpu) for gpu in range(present)] if visible is None else _names(visible)
        trainer = everything[:workers]
    if SERVER_GPUS in environment:
        return trainer, _names(environment[SERVER_GPUS])
    return trainer, [gpu for gpu in everything if gpu not in trainer]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
