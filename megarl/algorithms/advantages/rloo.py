"""Leave-one-out baseline (RLOO)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, GroupSettings, for_all_tokens, score_groups
from megarl.algorithms.lazy import Tensor, no_grad


@ADVANTAGES.register("rloo", settings=GroupSettings)
@no_grad
def rloo(
    token_rewards: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    allow_singleton: bool = False,
) -> Estimate:
    """Compute A = score - mean score of the other samples of the group = n / (n - 1) (score - group mean).

    Source: Back to Basics (arXiv 2402.14740). Arguments and result: see `advantages.base`.
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    return for_all_tokens(groups.centred * groups.count / (groups.count - 1).clamp(min=1), rows, mask, token_rewards)
