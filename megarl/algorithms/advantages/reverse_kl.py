"""On-policy distillation: advantages from the teacher's log-probs of the sampled tokens."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.registry import Settings
from megarl.algorithms.rows import at_least_float32


class ReverseKLSettings(Settings):
    """The bound of the advantages, which are log-ratios of teacher and policy."""

    loss_max_clamp: PositiveFloat | None = Field(
        None, description="largest absolute value of an advantage; null: no bound"
    )


@ADVANTAGES.register("reverse_kl", settings=ReverseKLSettings)
@no_grad
def reverse_kl(
    old_logp: Tensor, teacher_logp: Tensor, mask: Tensor, *, loss_max_clamp: float | None = None
) -> Estimate:
    """Compute A_t = log teacher - log pi of the sampled token: minus an unbiased estimate of KL(pi || teacher).

    Each token is charged only for its own divergence, not for the divergence of later tokens.

    Args:
        old_logp, teacher_logp: float [N] or [B, T], log-probs of the policy that sampled, and of the teacher.
        mask: bool, same shape.
        loss_max_clamp: largest absolute value of an advantage; without it a token that the teacher finds nearly
            impossible gets -20 or less.

    Source: on-policy distillation (arXiv 2306.13649) with the reverse KL of MiniLLM (arXiv 2306.08543).

    >>> policy, teacher = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    >>> reverse_kl(policy, teacher, torch.ones(1, 2, dtype=torch.bool)).advantages
    tensor([[-0.6931,  0.6931]])
    """
    advantages = torch.where(mask, at_least_float32(teacher_logp) - at_least_float32(old_logp), 0)
    if loss_max_clamp is not None:
        advantages = advantages.clamp(-loss_max_clamp, loss_max_clamp)
    return Estimate(advantages, advantages)
