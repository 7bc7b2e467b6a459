"""PPO: a critic's values, GAE advantages, KL to the reference inside the reward, actor and critic updates.

rollout -> reward_submit -> reward -> [overlong] -> [kl_in_reward] -> advantage -> actor_train
       \\-> [old_logp], [ref_logp] --------------------/                /       \\-> critic_train
       \\-> value -----------------------------------------------------/
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.pipeline import Pipeline
from megarl.recipes.grpo import add_advantage, add_scoring
from megarl.runtime.stages import critic, rollout, update

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


def build_graph(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step."""
    p = Pipeline("ppo", "proximal policy optimisation with a critic", config)
    p.add(rollout.rollout)
    add_scoring(p, config)
    p.add(critic.value)
    add_advantage(p, config)
    p.add(update.actor_train)
    p.add(critic.critic_train)
    return p.build()
