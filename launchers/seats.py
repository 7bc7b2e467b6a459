"""Assigns the processes that Ray has placed to the workers of the teams.

    machine A   0 1 2 3 4 5 6 7        actor, tp 4, 8 workers:     A0 .. A7
    machine B   0 1 2 3 4 5 6 7        reference, tp 2, 6 workers: B0 .. B5,   critic, 2 workers: B6 B7

Ranks of a team on one machine are in the order of their GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from megarl.dag.placement import TeamPlan
from megarl.rollout.sglang.gpus import SERVER_GPUS, TRAINER_GPUS

#: Address of a node, and the GPUs that Ray gave to a process there: numbers, or UUIDs if the node was started with
#: them.
Place = tuple[str, list[str]]


#: Environment variable of a node in a heterogeneous job: the Ray resource that marks the team of the node.
NODES_OF = "MEGARL_NODES_OF"


def resource(team: str) -> str:
    """Return the name of the Ray resource that marks a team's own nodes, or for an empty name the shared nodes."""
    return f"megarl_team_{team}" if team else "megarl_other_teams"


def rank_order(places: Sequence[Place]) -> list[int]:
    """Return the indices that sort `places` by node, and within a node by GPU number, then UUID."""

    def key(index: int) -> tuple[str, list[tuple[float, str]], int]:
        host, gpus = places[index]
        return host, [(int(gpu), "") if gpu.isdecimal() else (math.inf, gpu) for gpu in gpus], index

    return sorted(range(len(places)), key=key)


def seats(places: Sequence[Place], teams: Sequence[TeamPlan], units: Mapping[str, int]) -> list[int]:
    """Return the index into `places` of every worker, team by team.

    A team that fits onto one machine is on one machine. A unit of a larger team is on one machine if any machine has
    room for all of it. Large teams choose first, and choose the tightest fit, which leaves larger machines to others.
    `units` has, for each team by name, the number of consecutive workers that belong together, such as tp * cp ranks.
    """
    order = rank_order(places)
    free: dict[str, list[int]] = {}
    for index in order:
        free.setdefault(places[index][0], []).append(index)
    chosen: dict[str, list[int]] = {}
    for team in sorted(teams, key=lambda team: -team.devices):
        whole, rest = _choose(team.devices, units[team.name], free)
        chosen[team.name] = sorted(whole, key=order.index) + rest
    return [index for team in teams for index in chosen[team.name]]


def assign_seats_by_team(
    places: Sequence[Place], teams: Sequence[TeamPlan], units: Mapping[str, int], apart: Collection[str]
) -> list[int]:
    """Return the index into `places` of every worker, in the workers' order, with each team in `apart` on its own
    nodes."""
    chosen: dict[str, list[int]] = {}
    shared = [team for team in teams if team.name not in apart]
    for group in [*([team] for team in teams if team.name in apart), shared]:
        workers = [number for team in group for number in range(team.first, team.first + team.devices)]
        numbers = iter(workers[index] for index in seats([places[number] for number in workers], group, units))
        chosen |= {team.name: [next(numbers) for _ in range(team.devices)] for team in group}
    return [index for team in teams for index in chosen[team.name]]


def _choose(need: int, unit: int, free: dict[str, list[int]]) -> tuple[list[int], list[int]]:
    """Choose `need` of the processes in `free` for a team; return those in units (consecutive workers that should share
    a machine) that fit on one machine, and the others.
    """
    whole: list[int] = []
    rest: list[int] = []
    while need:
        fits = [host for host, indices in free.items() if len(indices) >= need]
        host = min(fits, key=lambda h: len(free[h])) if fits else max(free, key=lambda h: len(free[h]))
        size = min(need, len(free[host]))
        if size >= unit and not fits:
            size -= size % unit
        chosen, free[host] = free[host][:size], free[host][size:]
        (whole if size >= unit else rest).extend(chosen)
        need -= size
    return whole, rest


def ranks_of(
    team: TeamPlan, places: Sequence[Place], *, lends: bool = False, servers: Sequence[Place] | None = None
) -> list[dict[str, str]]:
    """Return torchrun's environment variables for each of a team's workers, in the order of their ranks, and the lists
    of the trainer's and the servers' GPUs on the worker's machine.

    Args:
        places: the places of all workers of the run.
        lends: whether the team's workers leave their GPUs to servers; the trainer's list then lacks these GPUs.
        servers: the places whose GPUs the team's servers take; None: the variables do not list servers' GPUs.
    """
    workers = slice(team.first, team.first + team.devices)
    # The trainer's list begins with the team's own GPUs, unless they are lent; colocated servers share these. The other
    # teams' GPUs follow, because no server may take them.
    ordered = [*([] if lends else places[workers]), *places[: workers.start], *places[workers.stop :]]
    hosts = [host for host, _ in places[workers]]
    machines = list(dict.fromkeys(hosts))
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(team.devices),
            "LOCAL_RANK": str(hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(host)),
            "GROUP_RANK": str(machines.index(host)),
            "GROUP_WORLD_SIZE": str(len(machines)),
            TRAINER_GPUS: gpus_of(host, ordered),
            **({} if servers is None else {SERVER_GPUS: gpus_of(host, servers)}),
        }
        for rank, host in enumerate(hosts)
    ]


def gpus_of(host: str, places: Sequence[Place]) -> str:
    """Return the GPUs that Ray gave to the processes of one node, in the order of `places`; empty without GPUs. Each
    process sees only its own GPUs, but the servers that the first process starts need the others.
    """
    return ",".join(gpu for node, gpus in places if node == host for gpu in gpus)
