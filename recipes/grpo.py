"""GRPO: n samples per prompt, advantage = score against the group, clipped policy gradient.

    rollout -> reward_submit -> reward -> [overlong] -> [kl_in_reward] -> [filter] -> advantage -> actor_train
           \\-> [old_logp -> rollout_correction] -> [sum_pi_squared] --/
           \\-> [ref_logp], [teacher_logp], [greedy_rollout] --------------/

Rewards are computed by other processes while the log-prob nodes run. `old_logp` exists only when it is needed: with
one optimizer step per batch the policy that samples are scored with is the one that is being trained. In bypass
`rollout_as_old` stands in its place and computes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.algorithm import GRADIENT_ESTIMATORS
from megarl.dag.node import NodeType, Role
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import contract_of
from megarl.runtime.stages import advantage, correction, logprob, reward, rollout, shaping, update

if TYPE_CHECKING:
    from collections.abc import Callable

    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph

#: Fields that estimators read in addition to rewards.
ESTIMATOR_FIELDS = {
    "gdpo": ["reward_parts"],
    "remax": ["greedy_score"],
    "reverse_kl": ["old_logp", "teacher_logp"],
    **{name: ["old_logp", "sum_pi_squared"] for name in GRADIENT_ESTIMATORS},
}


def build_graph(config: RunConfig) -> TaskGraph:
    """The task graph of one training step."""
    p = Pipeline("grpo", "group-relative policy optimisation")
    p.add_node("rollout", rollout.rollout, type=NodeType.MODEL_INFERENCE, role=Role.ROLLOUT, only_forward=True)
    scored = [*add_scoring(p, config), *add_greedy(p, config, "rollout")]
    if config.algorithm.filter.active:
        p.add_node("filter", shaping.filter_samples, deps=scored, role=Role.ADVANTAGE)
        scored = ["filter"]
    add_update(p, config, scored)
    return p.build()


def add_scoring(p: Pipeline, config: RunConfig, source: str = "rollout") -> list[str]:
    """Rewards, and the log-probs that the recipe needs, of the samples of node `source`.

    Returns:
        The ids of the nodes whose outputs together hold everything.
    """
    p.add_node("reward_submit", reward.reward_submit, deps=[source], role=Role.REWARD)
    logprobs = add_logprobs(p, config, source)
    add_reward(p, config)
    return add_kl(p, config, [add_overlong(p, config, "reward"), *logprobs])


def add_reward(p: Pipeline, config: RunConfig) -> None:
    """The node `reward`, which collects what `reward_submit` started."""
    writes = [*contract_of(reward.reward).writes, *(["reward_parts"] if config.algorithm.advantage.parts else [])]
    p.add_node("reward", reward.reward, deps=["reward_submit"], role=Role.REWARD, writes=writes)


def add_greedy(p: Pipeline, config: RunConfig, source: str) -> list[str]:
    """Greedy responses to the prompts of node `source`, for the estimator that compares with them. Returns the ids."""
    if config.algorithm.advantage.name != "remax":
        return []
    return [_add_pass(p, "greedy_rollout", rollout.greedy_rollout, source, Role.ACTOR)]


def add_update(p: Pipeline, config: RunConfig, scored: list[str]) -> None:
    """Advantages from what the nodes `scored` hand on, fields of the estimator included, and the policy update."""
    needed = ESTIMATOR_FIELDS.get(config.algorithm.advantage.name, [])
    reads = [*contract_of(advantage.advantage).reads, *needed]
    p.add_node("advantage", advantage.advantage, deps=scored, role=Role.ADVANTAGE, reads=reads)
    p.add_node("actor_train", update.actor_train, deps=["advantage"], type=NodeType.MODEL_TRAIN, role=Role.ACTOR)


def add_logprobs(p: Pipeline, config: RunConfig, source: str) -> list[str]:
    """What the recipe needs models to say about the samples of node `source`. Returns the ids of the nodes."""
    algorithm, ids = config.algorithm, add_old_logp(p, config, source)
    if algorithm.advantage.name in GRADIENT_ESTIMATORS:
        ids.append(_add_pass(p, "sum_pi_squared", logprob.sum_pi_squared, ids[-1], Role.ACTOR))
    if algorithm.kl.use != "none":
        ids.append(_add_pass(p, "ref_logp", logprob.ref_logp, source, Role.REFERENCE))
    if algorithm.needs_teacher:
        ids.append(_add_pass(p, "teacher_logp", logprob.teacher_logp, source, Role.TEACHER))
    return ids


def add_overlong(p: Pipeline, config: RunConfig, source: str) -> str:
    """The length penalty after node `source`, when the recipe has one. Returns the id of the last node."""
    if config.algorithm.overlong.buffer_tokens is None:
        return source
    p.add_node("overlong", shaping.overlong, deps=[source], role=Role.REWARD)
    return "overlong"


def add_kl(p: Pipeline, config: RunConfig, ends: list[str]) -> list[str]:
    """The KL penalty after the nodes `ends`, when it is a part of the reward. Returns the ids of the last nodes."""
    if config.algorithm.kl.use != "reward":
        return ends
    p.add_node("kl_in_reward", advantage.kl_in_reward, deps=ends, role=Role.ADVANTAGE)
    return ["kl_in_reward"]


def add_old_logp(p: Pipeline, config: RunConfig, source: str) -> list[str]:
    """Old log-probs of the samples of node `source`, and rollout correction, as far as the recipe needs them.

    Bypass takes the rollout's log-probs for the old ones: there is no forward pass.

    Returns:
        The id of the last node; nothing when there is none.
    """
    knobs = config.rollout_correction.resolved()
    if knobs.bypass:
        p.add_node("rollout_as_old", correction.rollout_as_old, deps=[source], role=Role.ACTOR)
        return ["rollout_as_old"]
    if not needs_old_logp(config):
        return []
    _add_pass(p, "old_logp", logprob.old_logp, source, Role.ACTOR)
    stage = correction.rollout_correction if knobs.active else correction.rollout_gap
    p.add_node(stage.__name__, stage, deps=["old_logp"], role=Role.ACTOR)
    return [stage.__name__]


def _add_pass(p: Pipeline, name: str, func: Callable[..., object], source: str, role: Role) -> str:
    """A node that asks a model about the samples of node `source`. Returns its id."""
    p.add_node(name, func, deps=[source], type=NodeType.MODEL_INFERENCE, role=role, only_forward=True)
    return name


def needs_old_logp(config: RunConfig) -> bool:
    """False when one optimizer step uses every sample once: then the ratio is 1 and old log-probs are the new ones.

    True whatever the steps when the estimator, or the loss before the batch is cut, reads them, and when weights and
    rejection are made of them. In bypass nobody needs them.
    """
    algorithm, knobs = config.algorithm, config.rollout_correction.resolved()
    if knobs.active:
        return not knobs.bypass
    steps = (config.actor.mini_batch_size or config.data.batch_size) < config.data.batch_size
    several = steps or config.actor.ppo_epochs > 1
    return several or algorithm.kl.use == "reward" or algorithm.needs_old_logp or _looks_ahead(algorithm.loss.name)


def _looks_ahead(loss: str) -> bool:
    """Whether a user's loss sees the mini-batch before it is cut, and so before the update has scored it."""
    if ":" not in loss:
        return False  # `needs_old_logp` knows those of this package
    from megarl.algorithms.losses import POLICY_LOSSES

    return POLICY_LOSSES.spec(loss).prepare is not None
