"""Batch fields that a recipe's components read beyond those that every pipeline writes.

An estimator reads the fields that its parameters name; a loss and a filter declare theirs. Recipes add the nodes that
write these fields, and the checks look at the fields, not at component names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.divergences import chosen_divergence
from megarl.algorithms.group_filter import FILTERS
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.system.errors import UserError

if TYPE_CHECKING:
    from megarl.config.algorithm import AdvantageConfig, AlgorithmConfig

#: Arguments of an estimator that every pipeline provides.
_GIVEN = ("token_rewards", "mask", "offsets", "uid", "all_sum")


def estimator_fields(algorithm: AlgorithmConfig) -> list[str]:
    """Return the fields that the advantage estimator reads beyond rewards; none if the estimator is unknown."""
    return advantage_fields(algorithm.advantage)


def advantage_fields(section: AdvantageConfig) -> list[str]:
    """Return the fields that the estimator of a section reads beyond rewards; none if the estimator is unknown."""
    name = section.name
    try:
        settings, required = ADVANTAGES.spec(name).settings, ADVANTAGES.required(name)
    except UserError:
        return []  # the settings are invalid, which the checks of the recipe report
    return [field for field in required if field not in _GIVEN and field not in settings.model_fields]


def loss_fields(algorithm: AlgorithmConfig) -> list[str]:
    """Return the fields that the policy loss reads beyond advantages; a loss with a `prepare` reads old log-probs."""
    try:
        spec = POLICY_LOSSES.spec(algorithm.loss.name)
    except UserError:
        return []
    return [*spec.reads, *spec.prepare_reads, *(["old_logp"] if spec.prepare is not None else [])]


def distillation_fields(algorithm: AlgorithmConfig) -> list[str]:
    """Return the teacher's fields that the distillation term reads; none if its coefficient is 0."""
    section = algorithm.distillation
    if not section.coef:
        return []
    try:
        chosen = chosen_divergence(section)
    except UserError:
        chosen = None  # the settings are invalid, which the checks of the recipe report
    if chosen is None:
        return ["teacher_logp"]
    return ["teacher_hidden" if chosen.settings.topk is None else "teacher_topk"]


def reference_fields(algorithm: AlgorithmConfig) -> list[str]:
    """Return the reference's fields that the KL term of the loss reads; none without the term."""
    if algorithm.kl.use != "loss":
        return []
    try:
        whole = KL.spec(algorithm.kl.estimator).whole
    except UserError:
        whole = False  # the settings are invalid, which the checks of the recipe report
    return ["ref_hidden" if whole else "ref_logp"]


def whole_vocabulary(algorithm: AlgorithmConfig) -> str | None:
    """Return `teacher_hidden` or `ref_hidden` if the policy is compared with that model over the whole vocabulary, for
    which the field holds the model's hidden states; otherwise None.
    """
    fields = {"teacher_hidden", "ref_hidden"} & {*distillation_fields(algorithm), *reference_fields(algorithm)}
    return max(fields, default=None)


def filter_fields(algorithm: AlgorithmConfig) -> list[str]:
    """Return the fields that the sample filter reads beyond scores; none if there is no filter."""
    try:
        return list(FILTERS.spec(algorithm.filter.name).reads) if algorithm.filter.active else []
    except UserError:
        return []


def component_fields(algorithm: AlgorithmConfig) -> set[str]:
    """Return the fields that estimator, loss and filter read."""
    return {*estimator_fields(algorithm), *loss_fields(algorithm), *filter_fields(algorithm)}
