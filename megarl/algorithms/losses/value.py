"""Clipped regression of the critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.lazy import torch
from megarl.algorithms.rows import at_least_float32
from megarl.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor


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
        Token loss, zero where the mask hides, and metrics. float32 on a CPU goes through a fused kernel: its loss takes
        one backward pass, and its gradient has no derivative.

    Source: PPO's reference implementation; arXiv 2005.12729.
    """
    from megarl.algorithms.losses.fused import WithSlope
    from megarl.kernels.losses import loss_kernels

    kernels = loss_kernels(values, old_values, returns)
    if kernels is not None:
        loss, slope, statistics = kernels.value([values, old_values, returns], mask, clip)
        return WithSlope.apply(values, loss, slope), _metrics(statistics)
    values, old_values, returns = (
        torch.where(mask, at_least_float32(x), 0) for x in (values, old_values.detach(), returns.detach())
    )
    loss, clipped = (values - returns).square(), torch.zeros_like(mask)
    if clip is not None:
        near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        bounded = (near - returns).square()
        clipped = bounded > loss
        loss = torch.maximum(loss, bounded)
    counts = [mask.sum().double(), values.detach().sum().double(), (clipped & mask).sum().double()]
    return 0.5 * loss, _metrics(torch.stack(counts)[None])


def _metrics(statistics: Tensor) -> Metrics:
    """Metrics of blocks of tokens: number of valid ones, sum of their values, how many the clip stopped."""
    metrics = Metrics()
    counts, totals, clipped = (sum(column) for column in statistics.t().tolist())
    if counts:
        metrics.mean("critic/vpred_mean", totals, counts)
        metrics.mean("critic/vf_clipfrac", clipped, counts)
    return metrics
