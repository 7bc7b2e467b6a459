"""Importance weights from rollout ratios: truncated (TIS) or two-sided (IcePop), by token or by sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megarl.algorithms.correction.ratios import LIMIT, Ratios

Threshold = float | Sequence[float]


def importance_weights(ratios: Ratios, level: str, threshold: Threshold) -> Tensor:
    """Return the weight of each token ("token", [N]) or of each row ("sequence", [B]); hidden tokens get 0.

    token: w_t = min(rho_t, C). sequence: w = min(exp(sum log rho), C). With `[low, high]` for C the weight is the ratio
    where it lies inside, and 0 outside. Sums are clamped to +-20 before the exponential.

    Raises:
        ValueError: another level.

    Source: truncated importance sampling (Ionides 2008, and "Your efficient RL framework secretly brings you
    off-policy RL training", Yao et al. 2025); two-sided: IcePop (Ring-1T report, arXiv 2510.18855).

    >>> import torch
    >>> r = Ratios.of(torch.log(torch.tensor([[0.5, 4.0]])), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    >>> importance_weights(r, "token", 3.0).tolist(), importance_weights(r, "sequence", 3.0).tolist()
    ([0.5, 3.0], [2.0])
    >>> importance_weights(r, "token", [0.2, 3.0]).tolist()
    [0.5, 0.0]
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be token or sequence, got {level!r}")
    tokens = level == "token"
    ratio = ratios.rho if tokens else ratios.total.clamp(-LIMIT, LIMIT).exp()
    return bounded(ratio, threshold).masked_fill(~(ratios.mask if tokens else ratios.live), 0)


def bounded(ratio: Tensor, threshold: Threshold) -> Tensor:
    """Return min(ratio, C), or the ratio inside [low, high] and 0 outside."""
    if isinstance(threshold, Sequence):
        low, high = threshold
        return ratio.masked_fill((ratio < low) | (ratio > high), 0)
    return ratio.clamp(max=threshold)


def is_truncated(ratio: Tensor, threshold: Threshold) -> Tensor:
    """Return bool: ratios whose weight is not the ratio itself."""
    if isinstance(threshold, Sequence):
        low, high = threshold
        return (ratio < low) | (ratio > high)
    return ratio > threshold
