"""Clipped regression of the critic."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megarl.algorithms.losses.blocks import by_blocks, where_zero
from megarl.metrics import Metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Metrics]:
    """0.5 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) per token; average it with token-mean weights.

    Args:
        values: float [N] or [B, T], differentiable.
        old_values: same shape, before the update.
        returns: same shape.
        mask: bool, same shape.
        clip: eps; None: no clipping.

    Returns:
        Token loss, zero where the mask hides, and metrics.

    Source: PPO's reference implementation; arXiv 2005.12729.
    """
    if mask.numel() == 0:
        return values * 0, Metrics()

    def general(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.where(mask, values, 0)
        returns = torch.where(mask, returns, 0)
        loss, clipped = (values - returns).square(), torch.zeros_like(mask)
        if clip is not None:
            old_values = torch.where(mask, old_values, 0)
            near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
            bounded = (near - returns).square()
            clipped = bounded > loss
            loss = torch.maximum(loss, bounded)
        counts = [mask.sum().double(), values.detach().sum().double(), (clipped & mask).sum().double()]
        return 0.5 * loss, torch.stack(counts)

    loss, statistics = by_blocks(general, partial(_quick, clip), values, [old_values, returns], mask)
    metrics = Metrics()
    for count, total, n_clipped in statistics.tolist():
        if count:
            metrics.mean("critic/vpred_mean", total, count)
            metrics.mean("critic/vf_clipfrac", n_clipped, count)
    return loss, metrics


def _quick(
    clip: float | None, values: Tensor, old_values: Tensor, returns: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The loss and its slope where everything is valid."""
    error = values - returns
    loss = error.square()
    slope, n_clipped = error, 0
    if clip is not None:
        beyond = torch.nn.functional.softshrink(values - old_values, clip)  # how far outside the clip range
        bounded = (error - beyond).square_()
        worse = torch.maximum(loss, bounded)
        gap, loss = loss - worse, worse
        slope, n_clipped = where_zero(error, gap), int(gap.count_nonzero())
    total = float(values.sum(dtype=torch.float64))
    return loss.mul_(0.5), slope, torch.tensor([len(values), total, n_clipped], dtype=torch.float64)
