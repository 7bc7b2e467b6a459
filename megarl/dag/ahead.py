"""The requirements on a graph and its teams for the rollout's team to run ahead of the actor's.

    in_order   rollout's team   generate t + 1 ---->  generate t + 2 ---->
                                            \\  weights t /
               actor's team     train t ---------->  train t + 1 ------->

    as_ready   rollout's team   group after group, each replica by itself; weights when there are new ones
                                            \\ B groups that are ready
               actor's team     train t ---------->  train t + 1 ------->

Within a step everything goes from the rollout's team to others and nothing back to it. Where groups come one by one, it
walks its nodes for each of them, and generates others meanwhile: only its first node may ask the engine.
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
#: A team may be k + 1 steps ahead of who reads its mail, which lasts for `buffer.core.KEPT` steps; where both
#: samples and steps that are formed of them run ahead, it is twice that.
MOST = 30
#: The stage whose place a stream of groups takes.
ROLLOUT_STAGE = "megarl.runtime.stages.rollout:rollout"
_GREEDY = "megarl.runtime.stages.rollout:greedy_rollout"


def refuse_ahead(config: RunConfig, placement: Placement, graph: TaskGraph) -> None:
    """Refuse a staleness that these teams cannot have.

    Raises:
        ConfigError: says why.
    """
    _refuse_keys(config)
    lag = config.async_.max_staleness
    if lag == 0:
        return
    _refuse_settings(config, lag)
    team = placement.of_role(Role.ROLLOUT)
    if team is None:
        raise ConfigError(
            "nothing is generated, so nothing can run ahead", where=KEY, found=lag, allowed="0", fix=_off(config)
        )
    if Role.ACTOR in team.roles:
        raise ConfigError(
            "samples are generated while others are trained on, and the rollout takes turns with the actor in the team "
            f"{team.name}",
            where=KEY,
            found=lag,
            allowed="0, or more with the rollout in a team of its own",
            fix=f"name the teams in placement.teams, with rollout in one without the actor, or {_off(config)}",
        )
    back = placement.taken(team.name)
    if back:
        what = "; ".join(
            f"{', '.join(one.fields)} of {one.node} in {one.giver}, read by {_readers(graph, team, one)}"
            for one in back
        )
        raise ConfigError(
            f"the team {team.name} generates samples before other teams work on them, and takes from these what it "
            "needs in the same step",
            where=KEY,
            found=what,
            allowed="0, or a team that takes nothing",
            fix=f"put the rollout into a team without these other roles, or {_off(config)}",
        )
    if not config.async_.in_order:
        _refuse_nodes(config, team, graph)
    _refuse_samples(config, placement, team)


def _readers(graph: TaskGraph, team: TeamPlan, taken: Handover) -> str:
    """Return the nodes of a team that use the fields it is handed."""
    sources = {id: graph.inputs(id).sources for id in team.nodes}
    return ", ".join(id for id in team.nodes if any(sources[id].get(name) == taken.node for name in taken.fields))


def _off(config: RunConfig) -> str:
    """Return the overrides to run no step ahead."""
    return f"set {KEY}=0" + (f" {ORDER}=in_order" if not config.async_.in_order else "")


def _refuse_keys(config: RunConfig) -> None:
    """Check the keys against each other."""
    section, lag = config.async_, config.async_.max_staleness
    if lag > MOST:
        raise ConfigError(
            "teams would be too far apart for what they tell each other, which is kept for some steps only",
            where=KEY,
            found=lag,
            allowed=f"0 to {MOST}",
            fix=f"set {KEY}={MOST} or less",
        )
    if section.in_order and section.partial:
        raise ConfigError(
            "in order, all samples of a step are generated to their end with the weights of this step, so that no new "
            "ones come meanwhile",
            where=PARTIAL,
            found=True,
            allowed=f"false, or true with {ORDER}=as_ready",
            fix=f"set {PARTIAL}=false, or {ORDER}=as_ready",
        )
    if not section.in_order and lag == 0:
        raise ConfigError(
            "what is trained on when it is ready was begun before the last step was over, with older weights",
            where=KEY,
            found=lag,
            allowed=f"an integer from 1 on, or 0 with {ORDER}=in_order",
            fix=f"set {KEY}=1, or {ORDER}=in_order",
        )
    if policy_of(config).copies and config.actor.engine.offload:
        raise ConfigError(
            "in order, weights wait for their turn as copies of the actor's parameters, which are away between steps",
            where="actor.engine.offload",
            found=True,
            allowed=f"false with {KEY} above 1",
            fix=f"set actor.engine.offload=false, or {KEY}=1",
        )


def _refuse_settings(config: RunConfig, lag: int) -> None:
    if config.algorithm.dynamic_sampling.enabled and config.async_.in_order:
        raise ConfigError(
            "dynamic sampling asks for more samples of a step until there are enough, with the weights of that step, "
            "and these are gone once the next ones have come",
            where=KEY,
            found=lag,
            allowed=f"0 with algorithm.dynamic_sampling.enabled=true, or {ORDER}=as_ready",
            fix=f"set {KEY}=0, {ORDER}=as_ready, or algorithm.dynamic_sampling.enabled=false",
        )
    if config.rollout.stale_steps:
        raise ConfigError(
            "both make samples older than they have to be: rollout.stale_steps keeps old weights for experiments "
            "in a rollout that takes turns with the actor",
            where="rollout.stale_steps",
            found=config.rollout.stale_steps,
            allowed=f"0 with {KEY} above 0",
            fix="set rollout.stale_steps=0",
        )
    if config.async_.partial and config.rollout.sampling.min_new_tokens:
        raise ConfigError(
            "a sample that goes on with new weights is a request of its own to the engine, which counts its tokens "
            "from 0 again: its end could be put off once more",
            where="rollout.sampling.min_new_tokens",
            found=config.rollout.sampling.min_new_tokens,
            allowed=f"0 with {PARTIAL}=true",
            fix=f"set rollout.sampling.min_new_tokens=0, or {PARTIAL}=false",
        )


def _refuse_nodes(config: RunConfig, team: TeamPlan, graph: TaskGraph) -> None:
    """Refuse nodes of the rollout's team that it cannot walk group by group, or that need a model."""
    first, *later = (graph[id] for id in team.nodes)
    if first.func_name != ROLLOUT_STAGE:
        raise _refused(
            f"groups are generated one by one in the place of the stage {ROLLOUT_STAGE.partition(':')[2]}, and the "
            f"team {team.name} begins with another one",
            f"node {first.id!r}, {first.func_name}",
            f"a pipeline whose first node in this team is {ROLLOUT_STAGE}",
        )
    for node in later:
        if node.models:
            raise _refused(_model_reason(node, team), f"node {node.id!r}", *_model_way_out(node, team))
        if node.declared.resamples:
            raise _refused(
                f"a step is as many groups as {first.id!r} generates, one of each prompt, and node {node.id!r} makes "
                f"other samples of them in the team {team.name}",
                f"node {node.id!r}",
                f"no other node that resamples in the team {team.name}",
            )


def _model_reason(node: Node, team: TeamPlan) -> str:
    if node.func_name == _GREEDY:
        return (
            f"node {node.id!r} generates greedy responses for a step as a whole, in the middle of its walk, and the "
            "engine is at work on other groups then"
        )
    return (
        f"node {node.id!r} works with the {' and the '.join(node.models)}, for which all replicas of a team come "
        f"together, and those of the team {team.name} finish their groups each by itself"
    )


def _model_way_out(node: Node, team: TeamPlan) -> tuple[str, str | None]:
    """Return what is allowed, and the fix; None: as for everything else."""
    others = [role for role in node.models if role != Role.ROLLOUT.value]
    allowed = f"in the team {team.name} nodes that work with no model, after the one that generates"
    if Role.ROLLOUT.value in node.models or not others:
        return allowed, None
    return allowed, f"put the {' and the '.join(others)} into another team than {team.name}, or set {ORDER}=in_order"


def _refused(what: str, found: str, allowed: str, fix: str | None = None) -> ConfigError:
    """Return the error for a setting that groups which come one by one cannot have."""
    return ConfigError(what, where=ORDER, found=found, allowed=allowed, fix=fix or f"set {ORDER}=in_order {KEY}=1")


def _refuse_samples(config: RunConfig, placement: Placement, team: TeamPlan) -> None:
    samples = {one.samples for one in placement.given_by(team.name)}
    if len(samples) > 1:
        raise ConfigError(
            f"the team {team.name} hands over samples of several nodes, and a checkpoint keeps those of one for the "
            "next step",
            where=KEY,
            found=", ".join(sorted(samples)),
            allowed="0, or a pipeline whose nodes in this team resample once",
            fix=_off(config),
        )
