"""How `placement.auto` shares out workers: whole replicas, all of them, evenly or by what each team computes."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.artifacts.facts import ModelFacts, model_facts
from megarl.config.model import ModelConfig
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.node import Node
from megarl.dag.stage import Kind, Role
from megarl.errors import ConfigError, count

Roles = tuple[Role, ...]


def share_out(config: RunConfig, graph: TaskGraph, roles: Sequence[Role]) -> dict[str, tuple[Roles, int]]:
    """Roles and workers of every team: one for the actor with what decodes on its weights, one for each other model.

    Raises:
        ConfigError: teams are also given by hand; too few workers; no whole replicas that add up; or sizes of models
            are asked for and not known here.
    """
    placement, nproc = config.placement, config.cluster.nproc
    if placement.teams:
        raise ConfigError(
            "teams are given, and placement.auto would make others",
            where="placement.auto",
            found=placement.auto,
            allowed="null, with placement.teams",
            fix="leave one of the two out",
        )
    held: list[Roles] = [(Role.ACTOR, Role.ROLLOUT)]
    held += [(role,) for role in roles if role not in held[0]]
    sizes = [config.parallel_of(team[0].value).model_parallel_size for team in held]
    needs = ", ".join(f"{team[0].value} {size}" for team, size in zip(held, sizes, strict=True))
    if nproc < sum(sizes):
        raise ConfigError(
            f"{count(nproc, 'worker')} for teams that need {sum(sizes)}: {sum(sizes) - nproc} missing",
            where="cluster.nproc",
            found=nproc,
            allowed=f"at least {sum(sizes)}: {needs}",
            fix=f"set cluster.nproc={sum(sizes)}, or leave placement.auto out",
        )
    weights = [1.0] * len(held)
    if placement.auto == "param_aware":
        weights = [sum(_work(config, graph, role) for role in team) for team in held]
    shares = whole_replicas(nproc, sizes, weights)
    if shares is None:
        near = next(n for n in range(nproc - 1, 0, -1) if whole_replicas(n, sizes, weights) is not None)
        raise ConfigError(
            f"{count(nproc, 'worker')} cannot be shared out in whole replicas",
            where="placement.auto",
            found=f"cluster.nproc={nproc}",
            allowed=f"sums of multiples of these, at least one of each: {needs}",
            fix=f"set cluster.nproc={near}, or other layouts",
        )
    return {team[0].value: (team, share) for team, share in zip(held, shares, strict=True)}


def whole_replicas(devices: int, sizes: Sequence[int], weights: Sequence[float]) -> list[int] | None:
    """Shares of `devices` that are multiples of `sizes`, at least one each, about in proportion to `weights`.

    Returns:
        They add up to `devices`; None: no such shares do.

    >>> whole_replicas(8, [1, 1, 1], [1, 1, 1]), whole_replicas(16, [4, 6], [1, 1]), whole_replicas(7, [2, 4], [1, 1])
    ([3, 3, 2], [4, 12], None)
    """
    attainable = _attainable(devices, sizes)
    if not attainable[0] >> devices & 1:
        return None
    shares, left = [], devices
    for place, size in enumerate(sizes):
        wish = left * weights[place] / sum(weights[place:])
        rest = attainable[place + 1]
        options = [share for share in range(size, left + 1, size) if rest >> (left - share) & 1]
        shares.append(min(options, key=lambda share: (abs(share - wish), -share)))
        left -= shares[-1]
    return shares


def _attainable(devices: int, sizes: Sequence[int]) -> list[int]:
    """Bit n of entry i: the teams from i on can share n devices in whole replicas."""
    found, everything = [1], (1 << (devices + 1)) - 1
    for size in reversed(sizes):
        sums, step = found[0] << size, size
        while step <= devices:  # any number of further replicas: by doubling
            sums |= sums << step
            step *= 2
        found.insert(0, sums & everything)
    return found


def _work(config: RunConfig, graph: TaskGraph, role: Role) -> float:
    """Multiplications for each token of a step: parameters that compute it, times passes over them."""
    passes = sum(_passes(config, node) for node in graph if node.role is role)
    return passes * _facts(config, role).computing_parameters if passes else 0.0


def _passes(config: RunConfig, node: Node) -> float:
    """Passes over its model that a node makes; the backward pass counts as two."""
    if node.role is Role.ROLLOUT and config.rollout.engine != "embedded":
        return 0.0  # the servers' devices do it
    if node.kind is Kind.MODEL_TRAIN:
        return 3.0 * (config.critic if node.role is Role.CRITIC else config.actor).ppo_epochs
    return 1.0 if node.kind is Kind.MODEL_INFERENCE else 0.0


def _facts(config: RunConfig, role: Role) -> ModelFacts:
    """Sizes of a role's model."""
    path = None if role in (Role.ACTOR, Role.ROLLOUT) else getattr(config, role.value).path
    where = "model.path" if path is None else f"{role.value}.path"
    try:
        found = model_facts(config.model if path is None else ModelConfig(path=path))
    except ConfigError as error:
        raise ConfigError(error.what, where=where, found=error.found, allowed=error.allowed, fix=error.fix) from error
    if found is None:
        raise ConfigError(
            "placement.auto=param_aware goes by the sizes of all models, and those of this one are not known here",
            where=where,
            found=path or config.model.path,
            allowed="a folder, or a hub name that is in the local cache",
            fix="download the model first, or set placement.auto=even",
        )
    return found
