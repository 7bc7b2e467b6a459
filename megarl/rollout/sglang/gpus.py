"""The GPUs of a machine that a server sees.

    machine    0  1  2  3  4  5  6  7
    trainer    =========== (workers, in the order of their ranks)
    servers                =========== of their own: the next ones, or those that the launcher has reserved for them
               ===========             colocated: the trainer's

Names are what CUDA_VISIBLE_DEVICES takes: numbers of the machine, or UUIDs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config.sglang import SGLangConfig
from megarl.system.errors import ConfigError

#: GPUs of the workers of this machine, where each of them sees only its own: set by the Ray launcher. Without those of
#: workers that only send requests: their servers take these.
TRAINER_GPUS = "MEGARL_TRAINER_GPUS"
#: GPUs of this machine that the Ray launcher has reserved for the servers that are started on it.
SERVER_GPUS = "MEGARL_SERVER_GPUS"


def place_servers(servers: int, ranks: int, workers: Sequence[int], nnodes: int = 1) -> list[list[tuple[int, int]]]:
    """Return which nodes of which servers are on every machine, (server, node): equally many where machines are alike.

    Args:
        ranks: ranks of a server on one machine, each of which has a GPU.
        workers: workers of the team that starts the servers, by machine. They may lend their GPUs: the next server goes
            where most of these are left.
        nnodes: machines of a server, at most as many as there are.
    """
    left = list(workers)
    places = []
    for _ in range(servers):
        machines = sorted(sorted(range(len(left)), key=lambda m: -left[m])[:nnodes])
        for machine in machines:
            left[machine] -= ranks
        places.append(machines)
    found: list[list[tuple[int, int]]] = [[] for _ in workers]
    for server, machines in enumerate(sorted(places)):
        for node, machine in enumerate(machines):
            found[machine].append((server, node))
    return found


def most_servers(ranks: int, workers: Sequence[int], nnodes: int = 1) -> int:
    """Return how many servers find room on the GPUs that workers lend; arguments as of `place_servers`."""
    places = [number // ranks for number in workers]
    return max(n for n in range(sum(places) // nnodes + 1) if sum(min(place, n) for place in places) >= n * nnodes)


def server_gpus(
    config: SGLangConfig, servers: int, local: int, workers: int, environment: Mapping[str, str], present: int
) -> tuple[str, ...] | None:
    """Return the GPUs that server `local` of this machine's `servers` sees, its own first; None: all that this process
    sees.

    A colocated one also sees the rest of the trainer's: ranks on all of them hand it memory to map.

    Args:
        servers: servers of this machine; of one on several machines this machine has a part.
        local: 0, 1, ... on this machine.
        workers: trainer ranks of this machine.

    Raises:
        ConfigError: this machine has too few.
    """
    if config.gpus is None and (not present or config.first_gpu_given):
        return None
    trainer, rest = _split(workers, environment, present)
    pool = trainer if config.colocated else rest
    if config.gpus is not None:
        pool = [str(gpu) for gpu in config.gpus]
    ranks = config.ranks_per_node
    if len(pool) < servers * ranks:
        raise ConfigError(
            f"the servers of this machine need {servers * ranks} GPUs and have {len(pool)}: it shows "
            f"{len(trainer) + len(rest)}, of which the trainer has {len(trainer)}",
            where="rollout.sglang.gpus",
            found=config.gpus,
            allowed="one GPU per rank of a server",
            fix="lower rollout.sglang.servers, tp_size or cluster.nproc, or share them: rollout.sglang.colocated=true",
        )
    own = pool[local * ranks : (local + 1) * ranks]
    others = (*pool, *trainer) if config.colocated else ()
    return tuple(dict.fromkeys((*own, *others)))


def _split(workers: int, environment: Mapping[str, str], present: int) -> tuple[list[str], list[str]]:
    """Return this machine's GPUs: the trainer's, and those for servers."""
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
