"""Discounted token returns, whitened over the batch (REINFORCE++)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pydantic import Field

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, GroupSettings, for_all_tokens, score_groups
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.registry import Settings
from megarl.algorithms.rows import Rows
from megarl.algorithms.scan import over_valid, suffix_sum
from megarl.algorithms.stats import AllSum, one_rank, whiten_


class DiscountSettings(Settings):
    """The discount of REINFORCE++."""

    gamma: float = Field(1.0, ge=0, le=1, description="discount")


@ADVANTAGES.register("reinforce_pp", settings=DiscountSettings)
@no_grad
def reinforce_pp(
    token_rewards: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    gamma: float = 1.0,
    all_sum: AllSum = one_rank,
) -> Estimate:
    """Compute R_t = r_t + gamma R_{t+1} over valid tokens; A = R whitened over all valid tokens of all ranks.

    Args:
        mask: bool, same shape; tokens in a hole are skipped.
        gamma: discount per valid token.

    Source: REINFORCE++ (arXiv 2501.03262). Arguments and result: see `advantages.base`.
    """
    rows = Rows.of(mask, offsets)
    (returns,) = over_valid(lambda rewards, _: [suffix_sum(rewards, gamma)], rows, mask, [token_rewards], 1)
    return Estimate(whiten_(returns, mask, rows, all_sum, out=torch.empty_like(returns)), returns)


@ADVANTAGES.register("reinforce_pp_baseline", settings=GroupSettings)
@no_grad
def reinforce_pp_baseline(
    token_rewards: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    allow_singleton: bool = False,
    all_sum: AllSum = one_rank,
) -> Estimate:
    """Compute A = score - group mean, whitened over all valid tokens of all ranks.

    Args:
        allow_singleton: accept groups of one sample, which count as 0 in the whitening.

    Source: REINFORCE++ (arXiv 2501.03262). Arguments and result: see `advantages.base`.
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    advantages = whiten_(for_all_tokens(groups.centred, rows, mask, token_rewards).advantages, mask, rows, all_sum)
    return Estimate(advantages, advantages)
