"""Batch fields that the components of a recipe need, in addition to those that every pipeline writes.

They follow from the components only: an estimator takes what its parameters name, a loss says what it reads. Recipes
add the nodes that write these fields, and the checks ask for them instead of names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.group_filter import FILTERS
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.errors import UserError

if TYPE_CHECKING:
    from megarl.config.algorithm import AlgorithmConfig

#: What an estimator is given in every pipeline.
_GIVEN = ("token_rewards", "mask", "offsets", "uid", "all_sum")


def estimator_fields(algorithm: AlgorithmConfig) -> list[str]:
    """What the advantage estimator reads in addition to rewards; of one that cannot be found nothing is known."""
    name = algorithm.advantage.name
    try:
        settings, required = ADVANTAGES.spec(name).settings, ADVANTAGES.required(name)
    except UserError:
        return []  # the checks refuse it
    return [field for field in required if field not in _GIVEN and field not in settings.model_fields]


def loss_fields(algorithm: AlgorithmConfig) -> list[str]:
    """What the policy loss reads in addition to advantages; the old log-probs when it prepares the mini-batch."""
    try:
        spec = POLICY_LOSSES.spec(algorithm.loss.name)
    except UserError:
        return []
    return [*spec.reads, *(["old_logp"] if spec.prepare is not None else [])]


def distillation_fields(algorithm: AlgorithmConfig) -> list[str]:
    """What the distillation term reads of the teacher; nothing while it is off."""
    section = algorithm.distillation
    if not section.coef:
        return []
    try:
        return ["teacher_topk" if KL.spec(section.estimator).distributions else "teacher_logp"]
    except UserError:
        return ["teacher_logp"]  # the checks refuse it


def filter_fields(algorithm: AlgorithmConfig) -> list[str]:
    """What the sample filter reads in addition to scores; nothing while it is off."""
    try:
        return list(FILTERS.spec(algorithm.filter.name).reads) if algorithm.filter.active else []
    except UserError:
        return []


def component_fields(algorithm: AlgorithmConfig) -> set[str]:
    """What estimator, loss and filter read together."""
    return {*estimator_fields(algorithm), *loss_fields(algorithm), *filter_fields(algorithm)}
