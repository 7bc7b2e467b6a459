"""Functions that list which sample fields a recipe needs, for its estimator, its loss, and further terms of the update.

Stages declare with them what they read (`@stage(needs=...)`), and pipelines decide with them which nodes to add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.needs import (
    advantage_fields,
    component_fields,
    distillation_fields,
    filter_fields,
    loss_fields,
    reference_fields,
)
from megarl.data.fields import EXPERT_MASK, IMAGES, KEPT, ROUTES, SOURCE

if TYPE_CHECKING:
    from megarl.config.algorithm import AdvantageConfig
    from megarl.config.run import RunConfig


def needed_fields(config: RunConfig) -> set[str]:
    """List the fields that the recipe's estimator, update, filter and KL penalty in the reward read."""
    in_reward = ["old_logp", "ref_logp"] if config.algorithm.kl.use == "reward" else []
    return {*estimator_needs(config), *update_fields(config), *filter_fields(config.algorithm), *in_reward}


def estimators(config: RunConfig) -> dict[str, AdvantageConfig]:
    """Return the section of each policy's advantage estimator, by the policy's name (empty if there is one policy)."""
    common = config.algorithm.advantage
    if not config.policies:
        return {"": common}
    return {name: policy.advantage or common for name, policy in config.policies.items()}


def estimator_needs(config: RunConfig) -> list[str]:
    """List the fields that the policies' advantage estimators read beyond rewards."""
    return list(dict.fromkeys(name for section in estimators(config).values() for name in advantage_fields(section)))


def part_fields(config: RunConfig) -> list[str]:
    """List the batch field of the rewards' named parts, if the recipe's estimator reads it in addition to the score."""
    return ["reward_parts"] if config.algorithm.advantage.parts else []


def model_fields(config: RunConfig) -> list[str]:
    """List the fields that a reward model reads in addition to tokens: texts if it has a tokenizer of its own."""
    return [] if config.reward_model.form == "tokens" else ["prompt_text", "response_text", "row"]


def call_fields(config: RunConfig) -> list[str]:
    """List the fields that a model reads in addition to tokens: images, or the fields of the policy's task."""
    if config.task.writes_text:
        return [] if config.data.image_key is None else list(IMAGES)
    return config.task.model_fields(config)


def update_fields(config: RunConfig) -> list[str]:
    """List the fields that the policy update reads in addition to advantages."""
    algorithm = config.algorithm
    wanted = {
        "old_logp": config.rollout_correction.resolved().bypass or needs_old_logp(config),
    }
    read, taught = loss_fields(algorithm), [*reference_fields(algorithm), *distillation_fields(algorithm)]
    fields = list(dict.fromkeys([*read, *(name for name, needed in wanted.items() if needed), *taught]))
    experts = [] if config.data.experts is None else [EXPERT_MASK]
    return list(dict.fromkeys([*fields, *policy_fields(config), *echo_fields(config), *experts]))


def expert_fields(config: RunConfig) -> list[str]:
    """List the fields that distinguish expert responses from the policy's own; none without `data.experts`."""
    return [] if config.data.experts is None else [SOURCE, EXPERT_MASK]


def echo_fields(config: RunConfig) -> list[str]:
    """List the fields that the cross-entropy on the environment's tokens reads; none if its weight is 0."""
    return ["observation_mask"] if config.algorithm.loss.echo_coef else []


def policy_fields(config: RunConfig) -> list[str]:
    """List the fields that the policy reads in addition to tokens: those of `call_fields` and `replayed_fields`."""
    return [*call_fields(config), *replayed_fields(config)]


def scored_fields(config: RunConfig) -> list[str]:
    """List the fields from which log-probs are computed in addition to tokens: those of `call_fields`, and the tokens
    that the sampling filters kept.
    """
    return [*call_fields(config), *(KEPT if config.rollout.replay_kept_tokens else ())]


def replayed_fields(config: RunConfig) -> list[str]:
    """List the fields in which generation records its choices (experts, kept tokens) for training to repeat them."""
    rollout = config.rollout
    return [*([ROUTES] if rollout.replay_routes else []), *(KEPT if rollout.replay_kept_tokens else ())]


def needs_old_logp(config: RunConfig) -> bool:
    """Return whether old log-probs have to be computed.

    This is so if a step has several optimizer steps (with one, the ratio is 1), or if the estimator, the loss, the KL
    penalty in the reward or rollout correction in decoupled mode reads them. Bypass mode uses rollout log-probs.
    """
    algorithm, correction = config.algorithm, config.rollout_correction.resolved()
    if correction.active:
        return not correction.bypass
    size, models = config.data.batch_size, (policy.model for policy in config.policies.values())
    trained = [config.actor, *(config.models[name] for name in models if name in config.models)]
    several = any(settings.ppo_epochs > 1 or (settings.mini_batch_size or size) < size for settings in trained)
    of_trainer = {"old_logp", "sum_pi_squared"} & component_fields(algorithm)
    return several or algorithm.kl.use == "reward" or bool(of_trainer)


def teacher_fields(config: RunConfig) -> list[str]:
    """List the fields that teachers read in addition to tokens; several teachers also need each prompt's row."""
    return scored_fields(config) + (["uid", "row", "data_source"] if config.teacher.models else [])
