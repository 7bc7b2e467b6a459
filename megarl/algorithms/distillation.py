"""The loss term that moves the policy towards a teacher, on the policy's own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.algorithms.divergences import chosen_divergence, divergence
from megarl.algorithms.kl import chosen_estimator, kl_tokens
from megarl.algorithms.lazy import Tensor, torch

if TYPE_CHECKING:
    from megarl.config.algorithm import DistillationConfig
    from megarl.system.metrics import Metrics

#: Log-probs of a teacher; or the teacher's most likely tokens and the policy's log-probs of them.
Teacher: TypeAlias = "Tensor | Sequence[Tensor | None] | None"


def teacher_term(
    settings: DistillationConfig,
    logp: Tensor,
    teacher: Teacher,
    mask: Tensor,
    policy_loss: Callable[[Tensor], Tensor],
    metrics: Metrics,
) -> tuple[Tensor, Tensor]:
    """Return the distillation loss of every token, and its KL estimate without gradient; both zero where masked.

    `through: loss` minimises the estimate itself. `through: policy` uses minus the estimate (a constant) as the token's
    advantage in the policy loss of the task, with its ratio, clip and importance weights.

    Args:
        settings: `algorithm.distillation`.
        logp: float [N] or [B, T], differentiable.
        teacher: the teacher's log-probs, same shape; or its top tokens [N, K + 1, 2] and the policy's log-probs of them
            [N, K + 1] (`MegatronEngine.top_tokens`); or None and the divergence over the vocabulary [N].
        mask: bool, in the shape of `logp`.
        policy_loss: maps advantages to token losses.
        metrics: receives the extremes of the estimate, before the clamp, and both models' probability mass on the top
            k.

    Raises:
        ValueError: an input of the estimator is missing.

    Source: generalised distillation on the student's samples (arXiv 2306.13649); as an advantage: MiniLLM (arXiv
    2306.08543).
    """
    estimate = _estimate(settings, logp, teacher, mask, metrics)
    seen = estimate.detach()[mask]
    if seen.numel():
        metrics.min("actor/distillation_loss_min", float(seen.min()))
        metrics.max("actor/distillation_loss_max", float(seen.max()))
    if settings.loss_max_clamp is not None:
        estimate = estimate.clamp(-settings.loss_max_clamp, settings.loss_max_clamp)
    term = estimate if settings.through == "loss" else policy_loss(-estimate.detach())
    return term, estimate.detach()


def _estimate(settings: DistillationConfig, logp: Tensor, teacher: Any, mask: Tensor, metrics: Metrics) -> Tensor:
    if teacher is None:
        raise ValueError("the distillation term needs the teacher's log-probs")
    chosen = chosen_divergence(settings)
    if chosen is None:
        return kl_tokens(chosen_estimator(settings), logp, teacher, mask)
    top, policy = teacher
    if chosen.settings.topk is None:
        return torch.where(mask, policy, 0)
    theirs = top[:, :, 1]
    count = float(mask.sum())
    if count:
        for name, given in (("teacher", theirs), ("student", policy.detach())):
            mass = given[mask, :-1].double().exp().sum()
            metrics.mean(f"actor/distillation_{name}_mass", float(mass), count)
    hidden = ~mask[:, None]
    return torch.where(mask, divergence(chosen, theirs.masked_fill(hidden, 0), policy.masked_fill(hidden, 0)), 0)
