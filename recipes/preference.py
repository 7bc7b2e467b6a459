"""Learning from preferred and rejected responses; nothing is generated.

    dpo           pairs of the data -> ref_logp -> dpo_train
    kto           examples with labels -> ref_logp -> mismatched_ref_logp -> kto_train
    reward_model  pairs of the data -> reward_model_train

DPO's policy learns to prefer chosen to rejected responses, by log-ratios to a frozen reference; `preference.loss`
chooses among variants. KTO's policy makes desirable responses likelier, and others less likely, than a baseline; its
maths is in megarl/algorithms/kto.py. A reward model has one score per sequence instead of logits. The maths of pairs
is in megarl/algorithms/preference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl.dag.pipeline import Pipeline
from megarl.runtime.stages import kto, logprob, preference
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


#: The losses of each pipeline, the default first.
_LOSSES = {"dpo": ("sigmoid", "robust", "hinge", "ipo"), "kto": ("kto",), "reward_model": ("bradley_terry",)}
#: The stage that trains, and its pipeline.
TRAIN: dict[Callable[..., Any], str] = {
    preference.dpo_train: "dpo",
    kto.kto_train: "kto",
    preference.reward_model_train: "reward_model",
}


def build_dpo(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step of DPO."""
    p = _pipeline("dpo", "direct preference optimisation", config)
    p.add(logprob.ref_logp)
    p.add(preference.dpo_train)
    return p.build(preference.PAIR_FIELDS)


def build_kto(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step of KTO."""
    p = _pipeline("kto", "policy from desirable and undesirable responses", config)
    p.add(logprob.ref_logp)
    p.add(kto.mismatched_ref_logp)
    p.add(kto.kto_train)
    return p.build(kto.EXAMPLE_FIELDS)


def build_reward_model(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step of a reward model."""
    p = _pipeline("reward_model", "a sequence classifier that scores responses", config)
    p.add(preference.reward_model_train)
    return p.build(preference.PAIR_FIELDS)


def _pipeline(pipeline: str, title: str, config: RunConfig) -> Pipeline:
    """Return an empty pipeline, to which the caller adds nodes; errors as those of `check_loss`."""
    check_loss(pipeline, config)
    return Pipeline(pipeline, title, config)


def check_loss(pipeline: str, config: RunConfig) -> None:
    """Check that `preference.loss` belongs to the pipeline, one of `TRAIN`.

    Raises:
        ConfigError: the recipe lacks the section `preference`, or its loss belongs to another pipeline.
    """
    losses = _LOSSES[pipeline]
    if config.preference is None:
        raise ConfigError(
            f"the pipeline {pipeline} learns from {'examples' if pipeline == 'kto' else 'pairs of responses'} and "
            "needs the section preference",
            where="preference",
            found="null",
            allowed="a section with any of its keys",
            fix=f"add `preference: {{loss: {losses[0]}}}` to the recipe",
        )
    loss = config.preference.loss
    if loss not in losses:
        other = next(name for name, names in _LOSSES.items() if loss in names)
        raise ConfigError(
            f"this loss does not belong to the pipeline {pipeline}",
            where="preference.loss",
            found=loss,
            allowed=", ".join(losses),
            fix=f"set preference.loss={losses[0]}, or algorithm.pipeline={other}",
        )
