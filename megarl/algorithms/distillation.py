"""Divergence from a teacher over its k likeliest tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def forward_kl_topk(logp: Tensor, teacher_logp: Tensor, mask: Tensor) -> Tensor:
    """Sum over the teacher's k likeliest tokens v of q(v) (log q(v) - log pi(v)) at each position; differentiable in
    `logp`.

    The part of KL(teacher || pi) that the k tokens carry; with k the whole vocabulary it is the KL itself. It may be
    negative when pi puts more mass on them than the teacher does. Log-ratios are limited to +-20.

    Args:
        logp: float [..., K], log pi of the teacher's K likeliest tokens at positions [N] or [B, T].
        teacher_logp: same shape, log q of the same tokens; -inf for places that are not used.
        mask: bool, the positions' shape.

    Returns:
        float, the positions' shape, zero where the mask hides.

    Source: on-policy distillation with forward KL (arXiv 2306.13649).

    >>> teacher, policy = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    >>> forward_kl_topk(policy, teacher, torch.ones(1, dtype=torch.bool))  # 0.5 log 2
    tensor([0.3466])
    """
    used = mask[..., None] & (teacher_logp > -torch.inf)
    teacher = torch.where(used, teacher_logp.detach(), 0)
    distance = (teacher - torch.where(used, logp, 0)).clamp(-20, 20)
    return torch.where(used, teacher.exp() * distance, 0).sum(-1)
