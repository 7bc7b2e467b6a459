"""Distillation from the teacher's most likely tokens instead of the sampled one: the forward KL over its top k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from megarl.algorithms.kl import KL
from megarl.algorithms.registry import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.config.base import ComponentSection


class TopKSettings(Settings):
    """The part of the teacher's distribution that is compared."""

    topk: PositiveInt = Field(32, description="likeliest tokens of the teacher that are compared at every position")
    log_prob_min_clamp: float | None = Field(
        None, lt=0, description="log-probs below this count as this, of both models, -10 for instance; null: no bound"
    )


def topk_settings(section: ComponentSection) -> TopKSettings | None:
    """Return the settings of the section's estimator if it compares the teacher's most likely tokens, else None.

    Raises:
        UserError: the estimator is unknown, or a key is not its own.
    """
    chosen = KL.choose(section, "algorithm.distillation")
    if not chosen.spec.distributions:
        return None
    assert isinstance(chosen.settings, TopKSettings), "the checks ask for it"
    return chosen.settings


@KL.register("forward_kl_topk", settings=TopKSettings, distributions=True)
def forward_kl_topk(teacher: Tensor, cross: Tensor, *, topk: int, log_prob_min_clamp: float | None) -> Tensor:
    """Sum p (log p - log q) over the teacher's k most likely tokens, at least 0: p the teacher, q the policy.

    The probabilities of all other tokens are not compared, so the sum may be negative where the policy's mass on the
    top k exceeds the teacher's; such a token has no gradient.

    Args:
        teacher: float32 [N, K, 2], token ids and log-probs, see `teacher_terms`.
        cross: [N], sum over the same tokens of p log q, differentiable.
        topk, log_prob_min_clamp: the settings, already applied to the arguments.

    Source: GKD's forward KL (arXiv 2306.13649) on the teacher's top k, as verl's `forward_kl_topk`.

    >>> import torch
    >>> teacher = torch.tensor([[[7.0, -0.6931], [3.0, -1.3863]]])  # 1/2 and 1/4
    >>> cross = torch.tensor([0.5 * -1.3863 + 0.25 * -1.3863])  # the policy: 1/4 and 1/4
    >>> forward_kl_topk(teacher, cross, topk=2, log_prob_min_clamp=None)
    tensor([0.3466])
    """
    _, probabilities, logp = teacher_terms(teacher, log_prob_min_clamp)
    return ((probabilities * logp).sum(1) - cross).clamp(min=0)


def teacher_terms(teacher: Tensor, floor: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids int64, probabilities, log-probs (at least `floor`), [N, K] each, of `teacher` [N, K, 2]."""
    logp = teacher[:, :, 1]
    if floor is not None:
        logp = logp.clamp(min=floor)
    return teacher[:, :, 0].long(), logp.exp(), logp
