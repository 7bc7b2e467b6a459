"""Explained variance of a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.stats import AllSum, one_rank

_NOTHING = 1e-8  # rounding error of float32 returns that should be equal


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, all_sum: AllSum = one_rank) -> float | None:
    """Compute 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one, negative for a worse one.

    Both variances are over all valid tokens of all ranks together, in float64; it is not an average of per-rank values.

    Args:
        values: float [N] or [B, T], predictions.
        returns: same shape.
        mask: bool, same shape.
        all_sum: adds over ranks.

    Returns:
        The share; None when the returns do not vary (variance up to 1e-8).

    >>> all_tokens = torch.ones(4, dtype=torch.bool)
    >>> explained_variance(torch.tensor([0., 0., 1., 1.]), torch.tensor([0., 1., 2., 3.]), all_tokens)
    0.6
    """
    seen = returns[mask].double()
    kept = torch.stack([seen, seen - values[mask].double()])
    count, *sums = all_sum(torch.cat([kept.new_tensor([kept.shape[1]]), kept.sum(1)]).cpu()).tolist()
    if count == 0:
        return None
    means = kept.new_tensor(sums) / count
    total, left = (all_sum((kept - means[:, None]).square().sum(1).cpu()) / count).tolist()
    return 1 - left / total if total > _NOTHING else None
