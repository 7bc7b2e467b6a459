"""Generalised advantage estimation."""

from __future__ import annotations

from pydantic import Field

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate
from megarl.algorithms.lazy import Tensor, no_grad
from megarl.algorithms.registry import Settings
from megarl.algorithms.rows import Rows
from megarl.algorithms.scan import over_valid, suffix_sum
from megarl.algorithms.stats import AllSum, one_rank, whiten_


class GaeSettings(Settings):
    """Discount and lambda of GAE."""

    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(1.0, ge=0, le=1, description="GAE lambda")


@ADVANTAGES.register("gae", settings=GaeSettings)
@no_grad
def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
    all_sum: AllSum = one_rank,
) -> Estimate:
    """Compute delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V, before
    whitening.

    t + 1 is the next valid token: tokens in a hole of the mask (tool output, other turns) are skipped. The value after
    the last valid token is 0.

    Args:
        values: float, in the shape of the rewards.
        gamma: discount per valid token.
        whiten: give the advantages mean 0 and variance 1 over all valid tokens of all ranks.

    Source: arXiv 1506.02438. Arguments and result: see `advantages.base`.
    """

    def dense(r: Tensor, v: Tensor, prefix: Tensor) -> list[Tensor]:
        delta = r - v
        delta[:, :-1].add_(v[:, 1:], alpha=gamma)
        advantages = suffix_sum(delta, gamma * lam)
        return [advantages, v + advantages]

    rows = Rows.of(mask, offsets)
    advantages, returns = over_valid(dense, rows, mask, [token_rewards, values], 2)
    if whiten:
        whiten_(advantages, mask, rows, all_sum)
    return Estimate(advantages, returns)
