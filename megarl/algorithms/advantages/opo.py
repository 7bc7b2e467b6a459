"""Advantage against a length-weighted mean score (OPO)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, GroupSettings, for_all_tokens, score_groups
from megarl.algorithms.lazy import Tensor, no_grad, torch


@ADVANTAGES.register("opo", settings=GroupSettings)
@no_grad
def opo(
    token_rewards: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    allow_singleton: bool = False,
) -> Estimate:
    """Compute A = score - baseline; the baseline is the group's mean score weighted by length in valid tokens.

    This baseline has the least variance when a response's squared gradient norm grows with its length.

    Source: On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585). Arguments and result: see `advantages.base`.

    >>> rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> opo(rewards, mask, ["a", "a"]).advantages  # baseline (3 * 1 + 1 * 0) / 4
    tensor([[ 0.2500,  0.2500,  0.2500],
            [-0.7500, -0.0000, -0.0000]])
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    length = rows.counts(mask).double()
    baseline = groups.sum(length * groups.scores) / groups.sum(length).clamp(min=1)
    alone = groups.count < 2
    return for_all_tokens(torch.where(alone, 0, groups.scores - baseline), rows, mask, token_rewards)
