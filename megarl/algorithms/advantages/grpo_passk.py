"""Advantage of the best sample only (pass@k)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, NormSettings, for_all_tokens, score_groups
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.stats import EPS


@ADVANTAGES.register("grpo_passk", settings=NormSettings)
@no_grad
def grpo_passk(
    token_rewards: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    norm_by_std: bool = True,
    allow_singleton: bool = False,
) -> Estimate:
    """Give the best sample of a group (best - second best) / (group std + 1e-6), and all others 0.

    If two samples share the best score, all samples get 0.

    Args:
        norm_by_std: whether to divide by the standard deviation.

    Source: arXiv 2503.19595. Arguments and result: see `advantages.base`.

    >>> rewards = torch.tensor([[1.0], [4.0], [2.0]])
    >>> grpo_passk(rewards, torch.ones(3, 1, dtype=torch.bool), ["a"] * 3, norm_by_std=False).advantages.flatten()
    tensor([0., 2., 0.])
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    best = groups.largest(groups.scores, groups.live)
    second = groups.largest(groups.scores, groups.live & (groups.scores < best))
    winner = groups.live & (groups.scores == best) & (groups.sum((groups.scores == best) & groups.live) == 1)
    lead = torch.where(winner & (groups.count > 1), best - second, 0)
    return for_all_tokens(lead / (groups.std + EPS) if norm_by_std else lead, rows, mask, token_rewards)
