"""Checks that a graph and its teams allow the rollout's team to run ahead of the actor's team.

    in_order   rollout's team   generate t + 1 ---->  generate t + 2 ---->
                                            \\  weights t /
               actor's team     train t ---------->  train t + 1 ------->

    as_ready   rollout's team   group after group, per replica; new weights as they arrive
                                            \\ B finished groups
               actor's team     train t ---------->  train t + 1 ------->

Within a step, data flow from the rollout's team to other teams and never back. If groups come one by one, the team runs
its nodes for each group while it generates others: only its first node may use the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.dag.staleness import policy_of
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph
    from megarl.dag.node import Node
    from megarl.dag.placement import Handover, Placement, TeamPlan

KEY, ORDER, PARTIAL = "async.max_staleness", "async.order", "async.partial"
#: A team may be k + 1 steps ahead of a reader of its messages, which are kept for `buffer.core.KEPT` steps; it is twice
#: that if both samples and the steps formed of them run ahead.
MOST = 30
#: The stage that a stream of groups replaces.
ROLLOUT_STAGE = "megarl.runtime.stages.rollout:rollout"
_GREEDY = "megarl.runtime.stages.rollout:greedy_rollout"


def refuse_ahead(config: RunConfig, placement: Placement, graph: TaskGraph) -> None:
    """Check that the teams allow the recipe's `async.max_staleness`."""
    _refuse_keys(config)
    lag = config.async_.max_staleness
    if lag == 0:
        return
    _refuse_settings(config, lag)
    team = placement.of_role(Role.ROLLOUT)
    if team is None:
        raise ConfigError(
            "this recipe generates no samples, so nothing can run ahead",
            where=KEY,
            found=lag,
            allowed="0",
            fix=_off(config),
        )
    if Role.ACTOR in team.roles:
        raise ConfigError(
            "running ahead needs a rollout in a separate team, but the rollout takes turns with the actor in the team "
            f"{team.name}",
            where=KEY,
            found=lag,
            allowed="0, or more with the rollout in a team of its own",
            fix=f"name the teams in placement.teams, with rollout in one without the actor, or {_off(config)}",
        )
    back = placement.taken(team.name)
    if back:
        handovers = "; ".join(
            f"{', '.join(taken.fields)} of {taken.node} in {taken.giver}, read by {_readers(graph, team, taken)}"
            for taken in back
        )
        raise ConfigError(
            f"the team {team.name} cannot run ahead: it needs results of other teams for the samples that it "
            f"generated in "
            "the same step",
            where=KEY,
            found=handovers,
            allowed="0, or a team that needs no results of other teams",
            fix=f"put the rollout into a team without these other roles, or {_off(config)}",
        )
    if not config.async_.in_order:
        _refuse_nodes(config, team, graph)
    _refuse_samples(config, placement, team)


def _readers(graph: TaskGraph, team: TeamPlan, taken: Handover) -> str:
    """Return the nodes of a team that read the fields of a handover."""
    sources = {id: graph.inputs(id).sources for id in team.nodes}
    return ", ".join(id for id in team.nodes if any(sources[id].get(name) == taken.node for name in taken.fields))


def _off(config: RunConfig) -> str:
    """Return the overrides that turn running ahead off."""
    return f"set {KEY}=0" + (f" {ORDER}=in_order" if not config.async_.in_order else "")


def _refuse_keys(config: RunConfig) -> None:
    """Check the keys of `async` and keys that they exclude."""
    section, lag = config.async_, config.async_.max_staleness
    if lag > MOST:
        raise ConfigError(
            "max_staleness is too large: messages between teams are kept for some steps only",
            where=KEY,
            found=lag,
            allowed=f"0 to {MOST}",
            fix=f"set {KEY}={MOST} or less",
        )
    if section.in_order and section.partial:
        raise ConfigError(
            "in order, all samples of a step are generated completely with the weights of this step, so there are no "
            "partial "
            "samples",
            where=PARTIAL,
            found=True,
            allowed=f"false, or true with {ORDER}=as_ready",
            fix=f"set {PARTIAL}=false, or {ORDER}=as_ready",
        )
    if not section.in_order and lag == 0:
        raise ConfigError(
            "as_ready needs max_staleness: its groups begin before the previous step has ended, with older weights",
            where=KEY,
            found=lag,
            allowed=f"an integer from 1 on, or 0 with {ORDER}=in_order",
            fix=f"set {KEY}=1, or {ORDER}=in_order",
        )
    if policy_of(config).copies and config.actor.engine.offload:
        raise ConfigError(
            "in order, waiting weights are copies of the actor's parameters, which offloading removes between steps",
            where="actor.engine.offload",
            found=True,
            allowed=f"false with {KEY} above 1",
            fix=f"set actor.engine.offload=false, or {KEY}=1",
        )


def _refuse_settings(config: RunConfig, lag: int) -> None:
    if config.algorithm.dynamic_sampling.enabled and config.async_.in_order:
        raise ConfigError(
            "dynamic sampling requests more samples with the weights of a step until it has enough, but these "
            "weights are gone "
            "once newer ones have arrived",
            where=KEY,
            found=lag,
            allowed=f"0 with algorithm.dynamic_sampling.enabled=true, or {ORDER}=as_ready",
            fix=f"set {KEY}=0, {ORDER}=as_ready, or algorithm.dynamic_sampling.enabled=false",
        )
    if config.rollout.stale_steps:
        raise ConfigError(
            "rollout.stale_steps and async.max_staleness both make samples older: rollout.stale_steps is for "
            "experiments "
            "in which the rollout takes turns with the actor",
            where="rollout.stale_steps",
            found=config.rollout.stale_steps,
            allowed=f"0 with {KEY} above 0",
            fix="set rollout.stale_steps=0",
        )
    if config.async_.partial and config.rollout.sampling.min_new_tokens:
        raise ConfigError(
            "a partial sample continues with new weights as a new request, for which the engine counts tokens "
            "from 0 again, so "
            "min_new_tokens would apply again",
            where="rollout.sampling.min_new_tokens",
            found=config.rollout.sampling.min_new_tokens,
            allowed=f"0 with {PARTIAL}=true",
            fix=f"set rollout.sampling.min_new_tokens=0, or {PARTIAL}=false",
        )


def _refuse_nodes(config: RunConfig, team: TeamPlan, graph: TaskGraph) -> None:
    """Raise an error unless the rollout's team can run its nodes group by group, and those after the generation
    need no model."""
    first, *later = (graph[id] for id in team.nodes)
    if first.func_name != ROLLOUT_STAGE:
        raise _refused(
            f"the team {team.name} generates group by group instead of the stage "
            f"{ROLLOUT_STAGE.partition(':')[2]}, but its first "
            "node is a different stage",
            f"node {first.id!r}, {first.func_name}",
            f"a pipeline whose first node in this team is {ROLLOUT_STAGE}",
        )
    for node in later:
        if node.models:
            raise _refused(_model_reason(node, team), f"node {node.id!r}", *_model_way_out(node, team))
        if node.declared.resamples:
            raise _refused(
                f"a step has one group per prompt from {first.id!r}, but node {node.id!r} in the same team "
                f"{team.name} changes the "
                "samples",
                f"node {node.id!r}",
                f"no other node that resamples in the team {team.name}",
            )


def _model_reason(node: Node, team: TeamPlan) -> str:
    if node.func_name == _GREEDY:
        return (
            f"node {node.id!r} generates greedy responses for a whole step, while the engine is busy with other groups"
        )
    return (
        f"node {node.id!r} uses the {' and the '.join(node.models)}, which needs all replicas of a team at once, but "
        f"the "
        f"replicas of the team {team.name} finish their groups independently"
    )


def _model_way_out(node: Node, team: TeamPlan) -> tuple[str, str | None]:
    """Return the allowed value, and the fix; None: the usual fix."""
    others = [role for role in node.models if role != Role.ROLLOUT.value]
    allowed = f"in the team {team.name} nodes that work with no model, after the one that generates"
    if Role.ROLLOUT.value in node.models or not others:
        return allowed, None
    return allowed, f"put the {' and the '.join(others)} into another team than {team.name}, or set {ORDER}=in_order"


def _refused(what: str, found: str, allowed: str, fix: str | None = None) -> ConfigError:
    """Return the error for a setting that excludes groups that come one by one."""
    return ConfigError(what, where=ORDER, found=found, allowed=allowed, fix=fix or f"set {ORDER}=in_order {KEY}=1")


def _refuse_samples(config: RunConfig, placement: Placement, team: TeamPlan) -> None:
    samples = {handover.samples for handover in placement.given_by(team.name)}
    if len(samples) > 1:
        raise ConfigError(
            f"the team {team.name} passes on samples of several nodes, but a checkpoint keeps those of one node "
            f"for the next "
            "step",
            where=KEY,
            found=", ".join(sorted(samples)),
            allowed="0, or a pipeline whose nodes in this team resample once",
            fix=_off(config),
        )
