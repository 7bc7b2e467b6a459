"""Advantage in proportion to how rare success is (MaxRL)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, GroupSettings, for_all_tokens, score_groups
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.system.errors import ConfigError


@ADVANTAGES.register("maxrl", settings=GroupSettings)
@no_grad
def maxrl(
    token_rewards: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    allow_singleton: bool = False,
) -> Estimate:
    """Compute A = (score - group mean) / group mean; 0 if the group's mean is 0.

    With scores of 0 and 1 the expected gradient is that of a truncated series of log p, p the probability of success:
    maximum likelihood in place of the mean score. A success has advantage 3 if it is the only one of four samples, and
    1 if it is one of two.

    Raises:
        ConfigError: a score is negative; a negative group mean would reverse the sign of the advantages.

    Source: MaxRL (arXiv 2602.02710). Arguments and result: see `advantages.base`.

    >>> rewards = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    >>> maxrl(rewards, torch.ones(4, 1, dtype=torch.bool), ["a"] * 4).advantages.flatten()
    tensor([ 3., -1., -1., -1.])
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    if bool((groups.scores < 0).any()):
        raise ConfigError(
            "maxrl divides by the mean score of a prompt's samples, so no score may be negative",
            where="algorithm.advantage.name",
            found=f"a score of {float(groups.scores.min()):g}",
            allowed="scores of at least 0, best of 0 and 1; penalties and a KL in the reward count",
            fix="change the reward, or set algorithm.advantage.name=grpo",
        )
    scale = groups.mean.clamp(min=torch.finfo(torch.float64).tiny)
    return for_all_tokens(groups.centred / scale, rows, mask, token_rewards)
