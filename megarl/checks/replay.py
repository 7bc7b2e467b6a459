"""Checks of `data.replay`: the correction that stale samples need, and what does not go with them."""

from __future__ import annotations

from megarl.algorithms.needs import whole_vocabulary
from megarl.checks.checklist import Checklist
from megarl.checks.conflicts import Conflict, refuse_conflicts
from megarl.config.run import RunConfig
from megarl.config.task import SECTIONS
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
    refuse_conflicts(_conflicts(config, graph), KEY, f"{KEY}=null", checks)


def _conflicts(config: RunConfig, graph: TaskGraph | None) -> list[Conflict]:
    """Return the settings that do not go with replay."""
    algorithm = config.algorithm
    sampling, resampling, experts = algorithm.dynamic_sampling, algorithm.resampling, config.data.experts
    keeps = sampling.enabled and config.async_.in_order and sampling.surplus == "keep"
    whole, share, text = whole_vocabulary(algorithm), config.placement.share, config.task.writes_text
    term = "algorithm.kl.use" if whole == "ref_hidden" else "algorithm.distillation.coef"
    critic = graph is not None and Role.CRITIC in graph.roles
    return [
        Conflict("data.experts", "a section", experts is not None, "null", "the age of an expert is unknown"),
        Conflict(
            *("algorithm.resampling.name", resampling.name, resampling.active, "none"),
            "copies are those of the step that drew them",
        ),
        Conflict(
            *("algorithm.dynamic_sampling.surplus", sampling.surplus, keeps, "drop"),
            "surplus groups have fields that stored groups lack",
        ),
        Conflict(
            *("placement.share", share, share == "tokens", "dealt"),
            "groups are shared out by number, and a step has more of them than data.batch_size",
        ),
        Conflict(
            *(term, whole, whole is not None, "none" if whole == "ref_hidden" else "0"),
            "states of every token would be stored with the samples",
        ),
        Conflict(
            *("algorithm.pipeline", "with a critic", critic, "grpo"),
            "the critic's values of replayed samples are those of an earlier critic",
        ),
        Conflict(", ".join(SECTIONS), "a section", not text, "null", "only samples of text are stored"),
    ]
