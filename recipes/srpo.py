"""SRPO, and training of robot policies by success: simulator episodes, scores of the whole batch, groups of GRPO.

    rollout -> episode_reward -> [dynamic_sampling] -> [old_logp -> rollout_correction], [ref_logp] -> [value]
                                                                          -> advantage -> actor_train, [critic_train]

An estimator that reads a critic's values (`algorithm.advantage.name=gae`) adds `value` and `critic_train`. This is PPO
with one value and one advantage for each policy call.

With `algorithm.dynamic_sampling.metric=success` groups are filtered before they are scored:

    rollout -> [dynamic_sampling] -> episode_reward -> ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.pipeline import Pipeline
from megarl.recipes.grpo import add_advantage, add_filter, add_kl, add_logprobs
from megarl.robots import stages
from megarl.runtime.stages import critic, rollout, sampling, update
from megarl.runtime.stages.needs import needed_fields

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


def build_graph(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step."""
    p = Pipeline("srpo", "self-referential policy optimisation of robot policies", config)
    p.add(rollout.rollout)
    settings = config.algorithm.dynamic_sampling
    before = settings.metric == "success"
    if settings.enabled and before:
        p.add(sampling.dynamic_sampling)
    p.add(stages.episode_reward)
    if settings.enabled and not before:
        p.add(sampling.dynamic_sampling)
    add_logprobs(p, config)
    add_filter(p, config)
    add_kl(p, config)
    values = "values" in needed_fields(config)
    if values:
        p.add(stages.call_value, "value")
    add_advantage(p, config)
    p.add(update.actor_train)
    if values:
        p.add(critic.critic_train)
    return p.build()
