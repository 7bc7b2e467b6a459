"""Distributes workers over teams for `placement.auto`: whole replicas, evenly or by each team's work."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.artifacts.facts import ModelFacts, model_facts
from megarl.config.model import ModelConfig
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.measured import read_measured
from megarl.dag.node import Node, team_of
from megarl.dag.stage import Kind, Role
from megarl.system.errors import ConfigError, count

Roles = tuple[Role, ...]


def share_out(config: RunConfig, graph: TaskGraph, roles: Sequence[Role]) -> dict[str, tuple[Roles, int]]:
    """Return the roles and workers of every team: one of actor and rollout, and one for each other model."""
    placement, nproc = config.placement, config.cluster.nproc
    if placement.teams:
        raise ConfigError(
            "placement.auto and placement.teams are both set",
            where="placement.auto",
            found=placement.auto,
            allowed="null, with placement.teams",
            fix="remove one of the two",
        )
    teams: list[Roles] = [(Role.ACTOR, Role.ROLLOUT, *(role for role in roles if role.is_further))]
    teams += [(role,) for role in roles if role not in teams[0]]
    sizes = [config.parallel_of(team[0].value).model_parallel_size for team in teams]
    needs = ", ".join(f"{team[0].value} {size}" for team, size in zip(teams, sizes, strict=True))
    if nproc < sum(sizes):
        raise ConfigError(
            f"the teams need {count(sum(sizes), 'worker')}, but the run has {nproc}",
            where="cluster.nproc",
            found=nproc,
            allowed=f"at least {sum(sizes)}: {needs}",
            fix=f"set cluster.nproc={sum(sizes)}, or remove placement.auto",
        )
    weights = [1.0] * len(teams)
    if placement.auto == "measured":
        weights = _measured(config, graph, teams)
    elif placement.auto == "param_aware":
        weights = [_work(config, graph, team) for team in teams]
    batches = [math.gcd(*batch_sizes(config, team).values()) for team in teams]
    shares = whole_replicas(nproc, sizes, weights, batches)
    if shares is None:
        near = next((n for n in range(nproc - 1, 0, -1) if whole_replicas(n, sizes, weights, batches)), None)
        rows = [f"{team[0].value} a divisor of {batch}" for team, batch in zip(teams, batches, strict=True) if batch]
        raise ConfigError(
            f"{count(nproc, 'worker')} cannot be divided into whole replicas that share the batches equally",
            where="placement.auto",
            found=f"cluster.nproc={nproc}",
            allowed=f"workers per replica: {needs}; number of replicas: {', '.join(rows) or 'any'}",
            fix="change batch sizes or layouts" + ("" if near is None else f", or cluster.nproc={near}"),
        )
    return {team[0].value: (team, share) for team, share in zip(teams, shares, strict=True)}


def batch_sizes(config: RunConfig, roles: Sequence[Role]) -> dict[str, int]:
    """Return the batch sizes, by recipe key, that a team's number of replicas must divide; empty if any number is
    possible.

    Updates need equal shares; teams that only generate or score samples can have any number of replicas.
    """
    trains = [role for role in roles if role in (Role.ACTOR, Role.CRITIC) or role.is_further]
    sizes = {"data.batch_size": config.data.batch_size} if trains else {}
    minis = {
        f"{config.section_of(role.value)}.mini_batch_size": config.training_of(role.value).mini_batch_size
        for role in trains
    }
    sizes |= {key: mini for key, mini in minis.items() if mini is not None}
    if Role.ROLLOUT in roles and config.rollout.round_prompts is not None:
        sizes["rollout.round_prompts"] = config.rollout.round_prompts
    if Role.ACTOR in trains and config.sft.steps:
        sizes["sft.batch_size"] = config.sft.batch_size
    return sizes


def whole_replicas(
    devices: int, sizes: Sequence[int], weights: Sequence[float], batches: Sequence[int]
) -> list[int] | None:
    """Distribute `devices` as whole replicas, at least one per team, about in proportion to `weights`.

    Args:
        sizes: workers per replica of each team.
        batches: number that each team's number of replicas must divide; 0: any.

    Returns:
        Devices per team, which add up to `devices`; None if that is impossible.

    >>> whole_replicas(8, [1, 1, 1], [1, 1, 1], [0, 0, 0]), whole_replicas(8, [1, 1, 1], [1, 1, 1], [16, 16, 0])
    ([3, 3, 2], [2, 4, 2])
    """
    choices = [
        [n * size for n in range(1, devices // size + 1) if batch % n == 0]
        for size, batch in zip(sizes, batches, strict=True)
    ]
    attainable = _attainable(devices, choices)
    if not attainable[0] >> devices & 1:
        return None
    shares, left = [], devices
    for place, allowed in enumerate(choices):
        wish = left * weights[place] / sum(weights[place:])
        rest = attainable[place + 1]
        options = [share for share in allowed if share <= left and rest >> (left - share) & 1]
        shares.append(min(options, key=lambda share: (abs(share - wish), -share)))
        left -= shares[-1]
    return shares


def _attainable(devices: int, choices: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each team i, an integer whose bit n is set if teams i, i + 1, ... can have n devices together."""
    sums_from, everything = [1], (1 << (devices + 1)) - 1
    for shares in reversed(choices):
        sums = 0
        for share in shares:
            sums |= sums_from[0] << share
        sums_from.insert(0, sums & everything)
    return sums_from


def _measured(config: RunConfig, graph: TaskGraph, teams: Sequence[Roles]) -> list[float]:
    """Return the device-seconds per step of each team's nodes in an earlier run."""
    run = read_measured(config, graph)
    owner = {role: team[0].value for team in teams for role in team}
    homes = {node.id: team_of(node, owner) for node in graph}
    seconds = [run.device_seconds(id for id in homes if homes[id] == team[0].value) for team in teams]
    return [max(each, 1e-9) for each in seconds]  # a team without measured work also gets workers


def _work(config: RunConfig, graph: TaskGraph, team: Roles) -> float:
    """Return the work of a team per token: the parameters of its models times the passes over them. The team's first
    model counts at least one pass."""
    passes = {role: sum(_passes(config, node) for node in graph if node.role is role) for role in team}
    passes[team[0]] = max(passes[team[0]], 1.0)
    return sum(number * _facts(config, role).computing_parameters for role, number in passes.items() if number)


def _passes(config: RunConfig, node: Node) -> float:
    """Return the number of passes through its model that a node makes for each sample; a backward pass counts as two
    forward passes."""
    if node.role is Role.ROLLOUT and not config.rollout.holds_model:
        return 0.0  # generation by servers takes none of the workers' time
    if node.kind is Kind.MODEL_TRAIN:
        return 3.0 * config.training_of(node.role.value).ppo_epochs
    return 1.0 if node.kind is Kind.MODEL_INFERENCE else 0.0


def _facts(config: RunConfig, role: Role) -> ModelFacts:
    """Return the sizes of a role's model."""
    further = config.models.get(role.value)
    section = further or getattr(config, role.value)
    path = None if role in (Role.ACTOR, Role.ROLLOUT) else section.path
    where = "model.path" if path is None else f"{config.section_of(role.value)}.path"
    try:
        facts = model_facts(config.model if path is None else ModelConfig(path=path))
    except ConfigError as error:
        raise ConfigError(error.what, where=where, found=error.found, allowed=error.allowed, fix=error.fix) from error
    if facts is None:
        raise ConfigError(
            "placement.auto=param_aware needs the sizes of all models, but this model is not on this machine",
            where=where,
            found=path or config.model.path,
            allowed="a folder, or a hub name that is in the local cache",
            fix="download the model first, or set placement.auto=even",
        )
    return facts


#: Usual number of GPUs per machine.
USUAL_GPUS = 8


def workers_of_machine(config: RunConfig) -> int:
    """Return how many workers a machine holds: as many as the recipe places on each; on machines with GPUs the usual
    number of GPUs, or fewer if the recipe spreads its workers evenly over several machines.
    """
    cluster = config.cluster
    if cluster.device_memory_gb is None:
        return -(-cluster.nproc // cluster.nnodes)
    whole = cluster.nnodes > 1 and cluster.nproc % cluster.nnodes == 0
    return min(cluster.nproc // cluster.nnodes, USUAL_GPUS) if whole else USUAL_GPUS


def settings_of_workers(config: RunConfig, workers: int, unit: int = 1) -> str | None:
    """Return the overrides for a run with this many workers on whole machines, about as many per machine as now; None
    if no number of machines divides the workers.

    Args:
        unit: the workers per machine must be a multiple of this number.
    """
    cluster, most = config.cluster, workers_of_machine(config)
    if config.launch.slurm.teams:  # each team has its own nodes
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
