"""The term of an update that moves the policy towards a teacher, on the policy's own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.algorithms.divergences import chosen_divergence, divergence
from megarl.algorithms.kl import chosen_estimator, kl_tokens
from megarl.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.config.algorithm import DistillationConfig
    from megarl.system.metrics import Metrics

#: Log-probs of a teacher; or its most likely tokens, and the policy's log-probs of the same.
Teacher: TypeAlias = "Tensor | Sequence[Tensor | None] | None"


def teacher_term(
    settings: DistillationConfig,
    logp: Tensor,
    teacher: Teacher,
    mask: Tensor,
    policy_loss: Callable[[Tensor], Tensor],
    metrics: Metrics,
) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, and its KL estimate without gradient; both zero where masked.

    `through: loss` minimises the estimate itself. `through: policy` passes minus the estimate as the token's advantage
    to the policy loss, with the ratio, clip and importance weights of the task's loss: the estimate is a constant.

    Args:
        settings: `algorithm.distillation`.
        logp: float [N] or [B, T], differentiable.
        teacher: its log-probs, same shape; or its tokens [N, K + 1, 2] and the policy's log-probs of them [N, K + 1]
            (`MegatronEngine.top_tokens`); or None and the divergence over the vocabulary [N].
        mask: bool, in the shape of `logp`.
        policy_loss: advantages to token losses.
        metrics: receives the extremes of the estimate, before the clamp, and both models' mass on the top k.

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
        raise ValueError("a distillation term needs the log-probs of its model")
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
