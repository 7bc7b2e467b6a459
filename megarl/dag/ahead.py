"""Checks that a graph and its teams allow the rollout's team to run ahead of the actor's team.

    in_order   rollout's team   generate t + 1 ---->  generate t + 2 ---->
                                            \\  weights t /
               actor's team     train t ---------->  train t + 1 ------->

    as_ready   rollout's team   group after group, per replica; new weights as they arrive
                                            \\ B finished groups
               actor's team     train t ---------->  train t + 1 ------->

Within a step, data flow from the rollout's team to other teams and never back. With as_ready, the team runs its nodes
for each finished group while it generates others, so only its first node may use the engine.
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
    from megarl.dag.placement import Placement, TeamPlan

KEY, ORDER, PARTIAL = "async.max_staleness", "async.order", "async.partial"
#: Largest `async.max_staleness` k. A team may be k + 1 steps ahead of a reader of its messages, or twice as many if
#: both samples and the steps formed from them run ahead; messages are kept for `buffer.core.KEPT` steps.
MOST = 30
#: The stage that async.order=as_ready replaces by a stream of groups.
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
        sources = {id: graph.inputs(id).sources for id in team.nodes}
        readers = [
            [id for id in team.nodes if any(sources[id].get(field) == handover.node for field in handover.fields)]
            for handover in back
        ]
        raise ConfigError(
            f"the team {team.name} cannot run ahead: it needs results of other teams for the samples that it "
            "generated in the same step",
            where=KEY,
            found="; ".join(
                f"{', '.join(handover.fields)} of {handover.node} in {handover.giver}, read by {', '.join(nodes)}"
                for handover, nodes in zip(back, readers, strict=True)
            ),
            allowed="0, or a team that needs no results of other teams",
            fix=f"move the other roles of {team.name} into other teams, or {_off(config)}",
        )
    if not config.async_.in_order:
        _refuse_nodes(config, team, graph)
    _refuse_samples(config, placement, team)


def _off(config: RunConfig) -> str:
    """Return the overrides that switch off generation ahead of training."""
    return f"set {KEY}=0" + (f" {ORDER}=in_order" if not config.async_.in_order else "")


def _refuse_keys(config: RunConfig) -> None:
    """Check the keys of `async` and keys that they exclude."""
    section, lag = config.async_, config.async_.max_staleness
    if lag > MOST:
        raise ConfigError(
            "async.max_staleness is too large: messages between teams are kept for a limited number of steps",
            where=KEY,
            found=lag,
            allowed=f"0 to {MOST}",
            fix=f"set {KEY}={MOST} or less",
        )
    if section.in_order and section.partial:
        raise ConfigError(
            "with async.order=in_order, samples are never interrupted by new weights, so none are partial",
            where=PARTIAL,
            found=True,
            allowed=f"false, or true with {ORDER}=as_ready",
            fix=f"set {PARTIAL}=false, or {ORDER}=as_ready",
        )
    if not section.in_order and lag == 0:
        raise ConfigError(
            "async.order=as_ready needs max_staleness of at least 1: its groups begin before the previous step has "
            "ended, with older weights",
            where=KEY,
            found=lag,
            allowed=f"1 to {MOST}, or 0 with {ORDER}=in_order",
            fix=f"set {KEY}=1, or {ORDER}=in_order",
        )
    policy_of(config)  # refuses a policy of the user that cannot be loaded or is of another class


def _refuse_settings(config: RunConfig, lag: int) -> None:
    if config.algorithm.dynamic_sampling.enabled and config.async_.in_order:
        raise ConfigError(
            "dynamic sampling requests more samples with the weights of a step until it has enough, but these weights "
            "are gone once newer ones have arrived",
            where=KEY,
            found=lag,
            allowed=f"0 with algorithm.dynamic_sampling.enabled=true, or {ORDER}=as_ready",
            fix=f"set {KEY}=0, {ORDER}=as_ready, or algorithm.dynamic_sampling.enabled=false",
        )
    if config.rollout.stale_steps:
        raise ConfigError(
            "rollout.stale_steps and async.max_staleness are both set, and both make samples older: "
            "rollout.stale_steps is for experiments in which the rollout takes turns with the actor",
            where="rollout.stale_steps",
            found=config.rollout.stale_steps,
            allowed=f"0 with {KEY} above 0",
            fix="set rollout.stale_steps=0",
        )
    if config.async_.partial and config.rollout.sampling.min_new_tokens:
        raise ConfigError(
            "min_new_tokens would apply again to every partial sample: it continues with new weights as a new "
            "request, for which the engine counts tokens from 0",
            where="rollout.sampling.min_new_tokens",
            found=config.rollout.sampling.min_new_tokens,
            allowed=f"0 with {PARTIAL}=true",
            fix=f"set rollout.sampling.min_new_tokens=0, or {PARTIAL}=false",
        )


def _refuse_nodes(config: RunConfig, team: TeamPlan, graph: TaskGraph) -> None:
    """Check that the rollout's team can run its nodes group by group, and that the nodes after generation need no
    model.
    """
    first, *later = (graph[id] for id in team.nodes)
    if first.func_name != ROLLOUT_STAGE:
        raise _refused(
            f"the first node of the team {team.name} must be the stage {ROLLOUT_STAGE.partition(':')[2]}, "
            "because async.order=as_ready replaces this stage by generation group by group",
            f"node {first.id!r}, {first.func_name}",
            f"a pipeline whose first node in this team is {ROLLOUT_STAGE}",
        )
    for node in later:
        if node.models:
            raise _model_error(node, team)
        if node.declared.resamples:
            raise _refused(
                f"node {node.id!r} in the team {team.name} replaces samples, which only {first.id!r} may do: "
                "async.order=as_ready expects exactly one group of samples per prompt",
                f"node {node.id!r}",
                f"no node after {first.id!r} with resamples=True in the team {team.name}",
                f"remove {node.id!r} from the pipeline, or set {ORDER}=in_order {KEY}=1",
            )


def _model_error(node: Node, team: TeamPlan) -> ConfigError:
    """Return the error that a node after generation uses a model."""
    models = " and the ".join(node.models)
    if node.func_name == _GREEDY:
        problem = (
            f"node {node.id!r} generates greedy responses for a whole step, while the engine is busy with other groups"
        )
    else:
        problem = (
            f"node {node.id!r} uses the {models}, which needs all replicas of a team at once, but the replicas of the "
            f"team {team.name} finish their groups independently"
        )
    allowed = f"in the team {team.name} nodes that work with no model, after the one that generates"
    fix = f"put the {models} into a team other than {team.name}, or set {ORDER}=in_order"
    return _refused(problem, f"node {node.id!r}", allowed, None if Role.ROLLOUT.value in node.models else fix)


def _refused(problem: str, found: str, allowed: str, fix: str | None = None) -> ConfigError:
    """Return the error for a setting that async.order=as_ready excludes."""
    return ConfigError(problem, where=ORDER, found=found, allowed=allowed, fix=fix or f"set {ORDER}=in_order {KEY}=1")


def _refuse_samples(config: RunConfig, placement: Placement, team: TeamPlan) -> None:
    samples = {handover.samples for handover in placement.given_by(team.name)}
    if len(samples) > 1:
        raise ConfigError(
            f"the team {team.name} hands over samples of several nodes, but a checkpoint holds the samples of one "
            "node only",
            where=KEY,
            found=", ".join(sorted(samples)),
            allowed=f"{KEY}=0, or a pipeline in which only one node of this team generates or resamples samples",
            fix=_off(config),
        )
