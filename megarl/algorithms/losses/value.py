"""Clipped regression of the critic."""

from __future__ import annotations

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.rows import at_least_float32
from megarl.system.metrics import Metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Metrics]:
    """Compute 0.5 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) per token, to be averaged over tokens.

    Args:
        values: float [N] or [B, T], differentiable.
        old_values, returns: same shape; the values are those before the update.
        mask: bool, same shape.
        clip: eps; None: no clipping.

    Returns:
        Token loss, zero where the mask is False, and metrics.

    Source: PPO's reference implementation; arXiv 2005.12729.
    """
    values, old_values, returns = (
        torch.where(mask, at_least_float32(x), 0) for x in (values, old_values.detach(), returns.detach())
    )
    loss, clipped = (values - returns).square(), torch.zeros_like(mask)
    if clip is not None:
        near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        bounded = (near - returns).square()
        clipped = bounded > loss
        loss = torch.maximum(loss, bounded)
    with torch.no_grad():
        # One transfer for all numbers: each transfer stalls the GPU.
        sums = torch.stack([x.sum().double() for x in (mask, values, clipped & mask)])
    count, total, cut = sums.tolist()
    metrics = Metrics()
    if count:
        metrics.mean("critic/vpred_mean", total, count)
        metrics.mean("critic/vf_clipfrac", cut, count)
    return 0.5 * loss, metrics
