"""Checks of `data.replay`: the correction that stale samples need, and what does not go with them."""

from __future__ import annotations

from megarl.algorithms.needs import whole_vocabulary
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.stage import Role
from megarl.runtime.stages.replay import replay
from megarl.system.errors import count

KEY = "data.replay"


def check_replay(config: RunConfig, graph: TaskGraph | None, checks: Checklist) -> None:
    """Check correction, ages and updates of a run that trains on groups again."""
    settings = config.data.replay
    lag = config.rollout.stale_steps + config.async_.max_staleness  # only one of the two can be above 0
    if settings is None:
        return
    if not config.rollout_correction.resolved().bypass:
        checks.fail(
            "rollout_correction.mode",
            "replayed samples are off-policy: the loss has to take its ratio to the policy that generated them",
            found=config.rollout_correction.resolved().mode,
            allowed="bypass",
            fix="set rollout_correction.preset=ppo_is_bypass, or another preset of mode bypass",
        )
    if settings.max_age <= lag:
        checks.fail(
            f"{KEY}.max_age",
            "no group is ever young enough: a fresh group may already be as old as async.max_staleness or "
            "rollout.stale_steps allows",
            found=settings.max_age,
            allowed=f"integer > {lag}",
            fix=f"set {KEY}.max_age={lag + 4}",
        )
    if not settings.groups(config.data.batch_size):
        least = 0.5 / (config.data.batch_size + 0.5)
        checks.fail(
            f"{KEY}.share",
            f"a step of {count(config.data.batch_size, 'fresh group')} replays none: the share rounds to 0 groups",
            found=settings.share,
            allowed=f"number > {least:.3g}",
            fix=f"set {KEY}.share={1 / (config.data.batch_size + 1):.2g} for one group, or a larger data.batch_size",
        )
    if graph is not None and not any(node.func is replay for node in graph):
        checks.fail(
            KEY,
            f"the {config.algorithm.pipeline_name} pipeline has no node for replay",
            found=f"nodes {', '.join(graph.order())}",
            allowed="grpo, dapo, or a pipeline of yours with megarl.runtime.stages.replay:replay after the advantage",
            fix="add the nodes with megarl.recipes.grpo.add_advantage, or set data.replay=null",
        )
    for key, (value, why) in _conflicts(config, graph).items():
        if value is not None:
            checks.fail(
                key,
                f"{why}, so this does not go with {KEY}",
                found=value,
                allowed="the default, or no replay",
                fix=f"remove it, or set {KEY}=null",
            )


def _conflicts(config: RunConfig, graph: TaskGraph | None) -> dict[str, tuple[object, str]]:
    """Return key -> the value that does not go with replay, None if there is none, and why it does not."""
    sampling = config.algorithm.dynamic_sampling
    return {
        "data.experts": (None if config.data.experts is None else "a section", "the age of an expert is unknown"),
        "algorithm.resampling.name": (
            config.algorithm.resampling.name if config.algorithm.resampling.active else None,
            "copies are those of the step that drew them",
        ),
        "algorithm.dynamic_sampling.surplus": (
            "keep" if sampling.enabled and config.async_.in_order and sampling.surplus == "keep" else None,
            "surplus groups have fields that stored groups lack",
        ),
        "placement.share": (
            "tokens" if config.placement.share == "tokens" else None,
            "groups are shared out by number, and a step has more of them than data.batch_size",
        ),
        "algorithm.distillation": (
            whole_vocabulary(config.algorithm),
            "states of every token would be stored with the samples",
        ),
        "algorithm.pipeline": (
            "with a critic" if graph is not None and Role.CRITIC in graph.roles else None,
            "the critic's values of replayed samples are those of an earlier critic",
        ),
        KEY: (None if config.task.writes_text else "a section", "only samples of text are stored"),
    }
