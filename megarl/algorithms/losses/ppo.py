"""Clipped surrogate (PPO), with separate bounds (DAPO) and dual clip."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms.losses.base import LIMIT, POLICY_LOSSES, DualClipSettings, Prologue, ratio_metrics
from megarl.algorithms.losses.blocks import by_blocks, where_zero
from megarl.metrics import Metrics

_HIGHEST = math.exp(LIMIT) * 0.999


@POLICY_LOSSES.register("ppo")
def ppo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: DualClipSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and at most -A c where A < 0; r = exp(clamp(logp - old_logp, +-20)).

    Args:
        logp: float [N] or [B, T], differentiable.
        old_logp: same shape.
        advantages: same shape.
        mask: bool, same shape.
        cfg: clip_low, clip_high (0 is legal), dual_clip (c > 1, or None).
        offsets: int64 [B + 1] for the packed form; this loss needs no rows.

    Returns:
        Token loss, zero where the mask hides, and metrics.

    Source: PPO (arXiv 1707.06347), dual clip (arXiv 1912.09729), clip-higher (arXiv 2503.14476).

    >>> from types import SimpleNamespace
    >>> cfg = SimpleNamespace(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    >>> logp = torch.log(torch.tensor([1.5, 0.5, 5.0]))
    >>> ppo(logp, torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), torch.ones(3, dtype=torch.bool), cfg)[0]
    tensor([-1.2000,  0.8000,  3.0000])
    """
    if mask.numel() == 0:
        return logp * 0, Metrics()

    def general(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        p = Prologue.of(logp, old_logp, advantages, mask)
        loss, clipped, lower = clipped_surrogate(p.ratio, p.advantages, cfg)
        return loss, p.statistics(clipped, lower)

    loss, statistics = by_blocks(general, partial(_quick, cfg), logp, [old_logp, advantages], mask)
    return loss, ratio_metrics(statistics)


def _quick(
    cfg: DualClipSettings, logp: Tensor, old_logp: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The loss and its slope where no log-ratio reaches its limit and the dual clip stops nothing."""
    difference = logp - old_logp
    ratio = difference.exp()
    least, most = ratio.aminmax()
    bounds = torch.stack([least, most]).tolist()
    highest = _HIGHEST if cfg.dual_clip is None else min(_HIGHEST, cfg.dual_clip)
    if not (bounds[0] > 1 / _HIGHEST and bounds[1] < highest):  # NaN, too
        return None
    cost = advantages.neg()
    plain = cost * ratio
    loss = torch.maximum(plain, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high).mul_(cost))
    gap = plain - loss
    numbers = [len(logp), -difference.sum().double(), ratio.sum().double(), *bounds, int(gap.count_nonzero()), 0]
    return loss, where_zero(plain, gap), torch.tensor(numbers, dtype=torch.float64)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, cfg: DualClipSettings) -> tuple[Tensor, Tensor, Tensor | None]:
    """Token loss, which tokens the clip stopped, and which the dual clip (None: there is none)."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if cfg.dual_clip is None:
        return loss, clipped, None
    ceiling = -advantages * cfg.dual_clip
    lower = (advantages < 0) & (ceiling < loss)
    return torch.where(lower, ceiling, loss), clipped, lower
