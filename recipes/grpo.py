"""GRPO: n samples per prompt, advantage = score against the group, clipped policy gradient.

    rollout -> reward_submit -> reward -> [overlong] -> [kl_in_reward] -> advantage -> actor_train
           \\-> [old_logp] --------------------------------/------------------/
           \\-> [ref_logp] -------------------------------/

Rewards are computed by other processes while the log-prob nodes run. `old_logp` exists only when it is needed: with
one optimizer step per batch the policy that samples are scored with is the one that is being trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.node import NodeType, Role
from megarl.dag.pipeline import Pipeline
from megarl.runtime.stages import advantage, logprob, reward, rollout, shaping, update

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


def build_graph(config: RunConfig) -> TaskGraph:
    """The task graph of one training step."""
    p = Pipeline("grpo", "group-relative policy optimisation")
    p.add_node("rollout", rollout.rollout, type=NodeType.MODEL_INFERENCE, role=Role.ROLLOUT, only_forward=True)
    scored = add_scoring(p, config)
    p.add_node("advantage", advantage.advantage, deps=scored, role=Role.ADVANTAGE)
    p.add_node("actor_train", update.actor_train, deps=["advantage"], type=NodeType.MODEL_TRAIN, role=Role.ACTOR)
    return p.build()


def add_scoring(p: Pipeline, config: RunConfig, source: str = "rollout") -> list[str]:
    """Rewards, and the log-probs that the recipe needs, of the samples of node `source`.

    Returns:
        The ids of the nodes whose outputs together hold everything.
    """
    p.add_node("reward_submit", reward.reward_submit, deps=[source], role=Role.REWARD)
    logprobs = add_logprobs(p, config, source)
    p.add_node("reward", reward.reward, deps=["reward_submit"], role=Role.REWARD)
    return add_kl(p, config, [add_overlong(p, config, "reward"), *logprobs])


def add_logprobs(p: Pipeline, config: RunConfig, source: str) -> list[str]:
    """The log-probs of the samples of node `source` that the recipe needs, if any. Returns the ids of their nodes."""
    nodes = []
    if needs_old_logp(config):
        nodes.append(("old_logp", logprob.old_logp, Role.ACTOR))
    if config.algorithm.kl.use != "none":
        nodes.append(("ref_logp", logprob.ref_logp, Role.REFERENCE))
    for id, func, role in nodes:
        p.add_node(id, func, deps=[source], type=NodeType.MODEL_INFERENCE, role=role, only_forward=True)
    return [id for id, _, _ in nodes]


def add_overlong(p: Pipeline, config: RunConfig, source: str) -> str:
    """The length penalty after node `source`, when the recipe has one. Returns the id of the last node."""
    if config.algorithm.overlong.buffer_tokens is None:
        return source
    p.add_node("overlong", shaping.overlong, deps=[source], role=Role.REWARD)
    return "overlong"


def add_kl(p: Pipeline, config: RunConfig, ends: list[str]) -> list[str]:
    """KL in the reward after the nodes `ends`, when the recipe has it. Returns the ids of the last nodes."""
    if config.algorithm.kl.use != "reward":
        return ends
    p.add_node("kl_in_reward", advantage.kl_in_reward, deps=ends, role=Role.ADVANTAGE)
    return ["kl_in_reward"]


def needs_old_logp(config: RunConfig) -> bool:
    """False when one optimizer step uses every sample once: then the ratio is 1 and old log-probs are the new ones."""
    steps = (config.actor.mini_batch_size or config.data.batch_size) < config.data.batch_size
    return steps or config.actor.ppo_epochs > 1 or config.algorithm.kl.use == "reward"
