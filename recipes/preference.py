"""Learning from pairs of a better and a worse response. Nothing is generated.

    dpo           pairs of the data -> ref_logp -> dpo_train
    reward_model  pairs of the data -> reward_model_train

DPO's policy prefers chosen responses to rejected ones, by log-ratios to a frozen reference; `preference.loss` chooses
among its relatives. A reward model has one score per sequence in place of a vocabulary. The maths of both is in
megarl/algorithms/preference.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.pipeline import Pipeline
from megarl.errors import ConfigError
from megarl.runtime.stages import logprob, preference

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


def build_dpo(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step of DPO.

    Raises:
        ConfigError: the recipe has no section `preference`, or one with the loss of a reward model.
    """
    _check_section(config, scores=False)
    p = Pipeline("dpo", "direct preference optimisation", config)
    p.add(logprob.ref_logp)
    p.add(preference.dpo_train)
    return p.build(preference.PAIR_FIELDS)


def build_reward_model(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step of a reward model.

    Raises:
        ConfigError: the recipe has no section `preference`, or one with the loss of a policy.
    """
    _check_section(config, scores=True)
    p = Pipeline("reward_model", "a sequence classifier that scores responses", config)
    p.add(preference.reward_model_train)
    return p.build(preference.PAIR_FIELDS)


def _check_section(config: RunConfig, *, scores: bool) -> None:
    pipeline, loss = config.algorithm.pipeline, "bradley_terry" if scores else "sigmoid"
    if config.preference is None:
        raise ConfigError(
            f"the pipeline {pipeline} learns from pairs of responses, and the recipe does not say how",
            where="preference",
            found="null",
            allowed="a section with any of its keys",
            fix=f"add `preference: {{loss: {loss}}}` to the recipe",
        )
    if config.preference.scores is not scores:
        raise ConfigError(
            f"the pipeline {pipeline} trains {'a reward model' if scores else 'a policy'}, and this loss the other one",
            where="preference.loss",
            found=config.preference.loss,
            allowed="bradley_terry" if scores else "sigmoid, robust, hinge, ipo",
            fix=f"set preference.loss={loss}, or algorithm.pipeline={'dpo' if scores else 'reward_model'}",
        )
