"""PPO: a critic's values, GAE advantages, KL to the reference inside the reward, actor and critic updates.

rollout -> reward_submit -> reward -> [kl_in_reward] -> advantage -> actor_train -> critic_train
       \\-> value ---------/
       \\-> old_logp, ref_logp
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.node import NodeType, Role
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import contract_of
from megarl.recipes.grpo import add_scoring
from megarl.runtime.stages import advantage, critic, rollout, update

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


def build_graph(config: RunConfig) -> TaskGraph:
    """The task graph of one training step."""
    p = Pipeline("ppo", "proximal policy optimisation with a critic")
    p.add_node("rollout", rollout.rollout, type=NodeType.MODEL_INFERENCE, role=Role.ROLLOUT, only_forward=True)
    scored = add_scoring(p, config)
    p.add_node(
        "value", critic.value, deps=["rollout"], type=NodeType.MODEL_INFERENCE, role=Role.CRITIC, only_forward=True
    )
    p.add_node(
        "advantage",
        advantage.advantage,
        deps=[*scored, "value"],
        role=Role.ADVANTAGE,
        reads=[*contract_of(advantage.advantage).reads, "values"],
    )
    p.add_node("actor_train", update.actor_train, deps=["advantage"], type=NodeType.MODEL_TRAIN, role=Role.ACTOR)
    p.add_node("critic_train", critic.critic_train, deps=["advantage"], type=NodeType.MODEL_TRAIN, role=Role.CRITIC)
    return p.build()
