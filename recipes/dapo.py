"""DAPO: GRPO that samples until every group carries signal; clip-higher, token-mean loss, soft overlong penalty, no KL.

rollout -> reward_submit -> reward -> dynamic_sampling -> [filter] -> [overlong] -> [kl_in_reward] -> advantage -.
   ^                                        |                  |-> [old_logp -> rollout_correction] ---^          v
   '------------- more prompts -------------'                  '-> [ref_logp], [teacher_logp],         |     actor_train
      (inside the node, until the batch is full)                   [greedy_rollout] -------------------'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.node import NodeType, Role
from megarl.dag.pipeline import Pipeline
from megarl.recipes.grpo import add_greedy, add_kl, add_logprobs, add_overlong, add_reward, add_update
from megarl.runtime.stages import reward, rollout, sampling, shaping

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


def build_graph(config: RunConfig) -> TaskGraph:
    """The task graph of one training step."""
    p = Pipeline("dapo", "decoupled clip and dynamic sampling policy optimisation")
    p.add_node("rollout", rollout.rollout, type=NodeType.MODEL_INFERENCE, role=Role.ROLLOUT, only_forward=True)
    p.add_node("reward_submit", reward.reward_submit, deps=["rollout"], role=Role.REWARD)
    add_reward(p, config)
    p.add_node("dynamic_sampling", sampling.dynamic_sampling, deps=["reward"], role=Role.DYNAMIC_SAMPLING)
    chosen = "dynamic_sampling"
    if config.algorithm.filter.active:
        p.add_node("filter", shaping.filter_samples, deps=[chosen], role=Role.ADVANTAGE)
        chosen = "filter"
    shaped = add_overlong(p, config, chosen)  # before the log-probs: they hand on the rewards of what they score
    ends = add_kl(p, config, [shaped, *add_logprobs(p, config, shaped), *add_greedy(p, config, shaped)])
    add_update(p, config, ends)
    return p.build()
