"""Greedy-rollout baseline (ReMax)."""

from __future__ import annotations

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, for_all_tokens
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.rows import Rows


@ADVANTAGES.register("remax")
@no_grad
def remax(token_rewards: Tensor, mask: Tensor, greedy_score: Tensor, *, offsets: Tensor | None = None) -> Estimate:
    """Compute A = score - score of a greedy rollout of the same prompt.

    Args:
        greedy_score: float [B], score of the prompt's greedy response.

    Source: ReMax (arXiv 2310.10505). Arguments and result: see `advantages.base`.
    """
    rows = Rows.of(mask, offsets)
    score, live = rows.masked_sum(token_rewards, mask)
    advantages = torch.where(live, score.double() - greedy_score.double(), 0)
    return for_all_tokens(advantages, rows, mask, token_rewards)
