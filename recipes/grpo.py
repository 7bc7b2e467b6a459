"""GRPO: n samples per prompt, advantage = score against the group, clipped policy gradient.

    rollout -> reward_submit -> reward -> [overlong] -> [kl_in_reward] -> [filter] -> advantage -> actor_train
           \\-> [old_logp -> rollout_correction] -> [sum_pi_squared] --/
           \\-> [ref_logp], [teacher_logp], [greedy_rollout] --------------/

Other processes compute rewards while the log-prob nodes run. If a model of the run gives one of the rewards,
`model_score`, `rule_rewards` and `total_reward` replace `reward`. `old_logp` is only added if needed: with one
optimizer step per batch, the old policy is the one that is trained. In bypass mode `rollout_as_old` replaces it and
computes nothing. With `algorithm.resampling`, a node `resample` comes after advantage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.algorithms.needs import filter_fields
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Role, contract_of
from megarl.runtime.stages import (
    advantage,
    baseline,
    correction,
    curriculum,
    experts,
    logprob,
    replay,
    resampling,
    reward,
    rollout,
    shaping,
    turns,
    update,
)
from megarl.runtime.stages.needs import needed_fields
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph

#: Each stage writes the field of its name; distillation reads one of them.
_OF_TEACHERS = (logprob.teacher_logp, logprob.teacher_topk, logprob.teacher_hidden)


def build_graph(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step."""
    p = Pipeline("grpo", "group-relative policy optimisation", config)
    p.add(rollout.rollout)
    add_scoring(p, config)
    add_greedy(p, config)
    add_filter(p, config)
    add_advantage(p, config)
    p.add(update.actor_train)
    return p.build()


def add_advantage(p: Pipeline, config: RunConfig) -> None:
    """Add the node that computes advantages, and the nodes that the recipe's settings need around it.

    Before it: the choice between demonstrations and samples, keys of turns, running baselines; after it: resampling
    and replay.
    """
    if config.algorithm.loss.expert_gate is not None and config.data.experts is not None:
        p.add(experts.expert_gate)
    if "turn_keys" in needed_fields(config):
        p.add(turns.turn_keys)
    if "running_baseline" in needed_fields(config):
        p.add(baseline.running_baseline)
    p.add(advantage.advantage)
    if config.algorithm.resampling.active:
        p.add(resampling.resample)
    if config.data.replay is not None:
        p.add(replay.replay)


def add_scoring(p: Pipeline, config: RunConfig) -> None:
    """Add rewards, and the log-probs that are computed while reward functions run."""
    p.add(reward.reward_submit)
    add_logprobs(p, config)
    add_reward(p, config)
    add_overlong(p, config)
    add_kl(p, config)


def add_reward(p: Pipeline, config: RunConfig) -> None:
    """Add the node that waits for rewards; with a reward model, also the nodes that compute its scores and the sum."""
    if config.reward.of_model is None:
        p.add(reward.reward)
        add_curriculum(p, config)
        return
    early = {
        "algorithm.filter.name": config.filter_admits,
        "algorithm.dynamic_sampling.enabled": config.algorithm.dynamic_sampling.enabled and not config.async_.in_order,
        "algorithm.advantage.name": "greedy_score" in needed_fields(config),
    }
    for key, used in early.items():
        if used:
            raise ConfigError(
                "samples need their scores right after generation, but the reward model of this run only scores them "
                "later",
                where=key,
                found=f"with the reward {config.reward.described}",
                allowed="with rewards that are functions, or with the reward http for a served model",
                fix="remove this setting"
                + (
                    ""
                    if config.async_.in_order or key == "algorithm.advantage.name"
                    else ", or set async.order=in_order async.max_staleness=0"
                ),
            )
    p.add(reward.model_score)
    p.add(reward.rule_rewards)
    p.add(reward.total_reward)
    add_curriculum(p, config)


def add_curriculum(p: Pipeline, config: RunConfig) -> None:
    """Add the node that records the scores of prompts, if `data.curriculum` draws prompts by past success."""
    if config.data.curriculum is not None:
        p.add(curriculum.curriculum)


def add_logprobs(p: Pipeline, config: RunConfig) -> None:
    """Add old log-probs with rollout correction, and log-probs of reference and teacher, if they are needed.

    Bypass mode uses the rollout's log-probs as the old ones, without a forward pass.
    """
    needed, settings = needed_fields(config), config.rollout_correction.resolved()
    if settings.bypass:
        p.add(correction.rollout_as_old)
    elif "old_logp" in needed:
        p.add(logprob.old_logp)
        p.add(correction.rollout_correction if settings.active else correction.rollout_gap)
    for stage in (logprob.sum_pi_squared, logprob.ref_logp, logprob.ref_hidden, *_OF_TEACHERS):
        if stage.__name__ in needed:  # a stage is named like the field that it writes
            p.add(stage)


def add_greedy(p: Pipeline, config: RunConfig) -> None:
    """Add greedy responses to the prompts, if the advantage estimator needs them."""
    if "greedy_score" in needed_fields(config):
        p.add(rollout.greedy_rollout)


def add_filter(p: Pipeline, config: RunConfig) -> None:
    """Add the node that masks out samples by `algorithm.filter`, if the recipe has a filter.

    If the filter decides which groups are delivered to training, the rollout team runs it.
    """
    if not config.algorithm.filter.active:
        return
    contract = contract_of(shaping.filter_samples)
    if config.filter_admits:
        if late := filter_asks_models(config):
            raise ConfigError(
                "with async.order=as_ready the filter runs right after generation and scoring, but it reads "
                "fields that are computed later",
                where="algorithm.filter.name",
                found=f"{config.algorithm.filter.name}, which reads {', '.join(late)}",
                allowed="a filter of scores, tokens, texts and other fields of a scored sample",
                fix="set async.order=in_order async.max_staleness=1, or put the filter on a node of your own pipeline "
                "(megarl.runtime.stages.shaping.own_filter), which masks samples of a step",
            )
        contract = replace(contract, role=Role.REWARD)
    p.add(shaping.filter_samples, "filter", contract=contract)


def filter_asks_models(config: RunConfig) -> list[str]:
    """Return the fields that the filter reads and that models compute after generation (`add_logprobs`,
    `add_greedy`)."""
    of_trainer = correction.rollout_correction, correction.rollout_as_old, logprob.old_logp, logprob.sum_pi_squared
    stages = *of_trainer, logprob.ref_logp, *_OF_TEACHERS, rollout.greedy_rollout
    written = {field for stage in stages for field in contract_of(stage).writes}
    return [field for field in filter_fields(config.algorithm) if field in written]


def add_overlong(p: Pipeline, config: RunConfig) -> None:
    """Add the penalty for overlong responses, if the recipe has one."""
    if config.algorithm.overlong.buffer_tokens is not None:
        contract = contract_of(shaping.overlong)
        # With a reward model, the role of advantages sums the rewards, so the penalty is added there too.
        if config.reward.of_model is not None:
            contract = replace(contract, role=Role.ADVANTAGE)
        p.add(shaping.overlong, contract=contract)


def add_kl(p: Pipeline, config: RunConfig) -> None:
    """Add the node that subtracts the KL penalty from the reward, if `algorithm.kl.use` is `reward`."""
    if config.algorithm.kl.use == "reward":
        p.add(advantage.kl_in_reward)
