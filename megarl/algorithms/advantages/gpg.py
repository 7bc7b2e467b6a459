"""Group policy gradient (GPG): centred scores, scaled up for the samples whose group gives no gradient."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, GroupSettings, for_all_tokens, score_groups
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.stats import AllSum, one_rank


@ADVANTAGES.register("gpg", settings=GroupSettings)
@no_grad
def gpg(
    token_rewards: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    allow_singleton: bool = False,
    all_sum: AllSum = one_rank,
) -> Estimate:
    """Compute A = (score - group mean) / (share of samples whose group has unequal scores).

    A group with equal scores has no gradient but counts in the mean over the batch; the division compensates. The share
    is counted over all ranks.

    Source: GPG (arXiv 2504.02546), accurate gradient estimation. Arguments and result: see `advantages.base`.

    >>> rewards = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    >>> gpg(rewards, torch.ones(4, 1, dtype=torch.bool), ["a", "a", "b", "b"]).advantages.flatten()
    tensor([ 1., -1.,  0.,  0.])
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    # Compare the scores, not their deviation, which rounding can make positive for equal scores.
    signal = groups.live & (groups.largest(groups.scores, groups.live) > -groups.largest(-groups.scores, groups.live))
    with_signal, total = all_sum(torch.stack([signal.sum(), groups.live.sum()]).double().cpu()).tolist()
    centred = torch.where(signal, groups.centred, 0)
    return for_all_tokens(centred * (total / max(with_signal, 1.0)), rows, mask, token_rewards)
