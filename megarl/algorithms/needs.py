"""Batch fields that a recipe's components need, in addition to those that every pipeline writes.

They follow only from the components: an estimator takes the fields that its parameters name, a loss declares those that
it reads. Recipes add the nodes that write these fields, and the checks query them instead of names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.divergences import chosen_divergence
from megarl.algorithms.group_filter import FILTERS
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.system.errors import UserError

if TYPE_CHECKING:
    from megarl.config.algorithm import AlgorithmConfig

#: Fields that an estimator can use in every pipeline.
_GIVEN = ("token_rewards", "mask", "offsets", "uid", "all_sum")


def estimator_fields(algorithm: AlgorithmConfig) -> list[str]:
    """Return the fields that the advantage estimator reads in addition to rewards; none if it cannot be found."""
    name = algorithm.advantage.name
    try:
        settings, required = ADVANTAGES.spec(name).settings, ADVANTAGES.required(name)
    except UserError:
        return []  # the checks refuse it
    return [field for field in required if field not in _GIVEN and field not in settings.model_fields]


def loss_fields(algorithm: AlgorithmConfig) -> list[str]:
    """Return the fields that the policy loss reads beyond advantages; with a `prepare`, also the old log-probs."""
    try:
        spec = POLICY_LOSSES.spec(algorithm.loss.name)
    except UserError:
        return []
    return [*spec.reads, *(["old_logp"] if spec.prepare is not None else [])]


def distillation_fields(algorithm: AlgorithmConfig) -> list[str]:
    """Return the teacher's fields that the distillation term reads; none while it is off."""
    section = algorithm.distillation
    if not section.coef:
        return []
    try:
        chosen = chosen_divergence(section)
    except UserError:
        chosen = None  # the checks refuse it
    if chosen is None:
        return ["teacher_logp"]
    return ["teacher_hidden" if chosen.settings.topk is None else "teacher_topk"]


def filter_fields(algorithm: AlgorithmConfig) -> list[str]:
    """Return the fields that the sample filter reads in addition to scores; none while it is off."""
    try:
        return list(FILTERS.spec(algorithm.filter.name).reads) if algorithm.filter.active else []
    except UserError:
        return []


def component_fields(algorithm: AlgorithmConfig) -> set[str]:
    """Return the fields that estimator, loss and filter read together."""
    return {*estimator_fields(algorithm), *loss_fields(algorithm), *filter_fields(algorithm)}
