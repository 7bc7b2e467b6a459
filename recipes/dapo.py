"""DAPO: GRPO that samples until every group has unequal scores; clip-higher, token-mean loss, soft overlong penalty,
no KL.

rollout -> reward_submit -> reward -> dynamic_sampling -> [overlong] ---> [kl_in_reward] -> advantage -> actor_train
   ^                                        |     |  |-> [filter] ---------^                 ^
   '------------- more prompts -------------'     |  |-> [old_logp] -------^                 |
      (inside the node, until the batch is full)  |  '-> [ref_logp] -------^                 |
                                                  '-> [teacher_logp], [greedy_rollout] ------'

[rollout_correction] comes after [filter] and [old_logp], and before advantage. A filter that reads a model's output
comes after all these nodes instead, and before [kl_in_reward]. With `async.order: as_ready` or a class of the user's,
[overlong] and [filter] come before dynamic_sampling, which then gets only groups with unequal scores and requests no
prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.pipeline import Pipeline
from megarl.recipes.grpo import (
    add_advantage,
    add_filter,
    add_greedy,
    add_kl,
    add_logprobs,
    add_overlong,
    add_reward,
    filter_asks_models,
)
from megarl.runtime.stages import reward, rollout, sampling, update

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


def build_graph(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step."""
    p = Pipeline("dapo", "decoupled clip and dynamic sampling policy optimisation", config)
    p.add(rollout.rollout)
    p.add(reward.reward_submit)
    add_reward(p, config)
    apart = not config.async_.in_order  # whether scoring and dynamic sampling are in different teams
    asks_models = filter_asks_models(config)
    if apart:
        add_overlong(p, config)
        add_filter(p, config)
    p.add(sampling.dynamic_sampling)
    if not apart:
        if not asks_models:
            add_filter(p, config)
        add_overlong(p, config)
    add_logprobs(p, config)
    add_greedy(p, config)
    if asks_models:
        add_filter(p, config)
    add_kl(p, config)
    add_advantage(p, config)
    p.add(update.actor_train)
    return p.build()
