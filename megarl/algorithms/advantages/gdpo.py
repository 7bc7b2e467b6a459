"""Advantages with each part of the reward normalised separately (GDPO)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from pydantic import Field

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, GroupSettings, for_all_tokens
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.rows import Rows
from megarl.algorithms.stats import AllSum, GroupStats, one_rank, whiten_
from megarl.system.errors import ConfigError


class PartSettings(GroupSettings):
    """The weights of the reward's parts."""

    parts: dict[str, float] = Field(
        default_factory=dict, description="weight of each part that the reward function returns"
    )

    def problems(self, path: str) -> list[ConfigError]:
        """Return an error if no part is named."""
        if self.parts:
            return []
        problem = ConfigError(
            "gdpo needs the names of the reward's parts, but none is set",
            where=f"{path}.parts",
            found="{}",
            allowed="a mapping from names that the reward function returns to weights",
            fix=f"set {path}.parts={{accuracy: 1.0, format: 0.5}}, with your reward function's names",
        )
        return [problem]


@ADVANTAGES.register("gdpo", settings=PartSettings)
@no_grad
def gdpo(
    reward_parts: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    parts: Mapping[str, float] | None = None,
    offsets: Tensor | None = None,
    allow_singleton: bool = False,
    all_sum: AllSum = one_rank,
) -> Estimate:
    """Compute A = sum over parts k of weight_k (x_k - group mean) / (group std + 1e-6), whitened over all valid tokens.

    Every part has the influence that its weight gives it; in a sum of raw rewards the part with the largest scale
    dominates.

    Args:
        reward_parts: float [B, K], one column per part.
        parts: name and weight of each column, in order; None: all 1.
        allow_singleton: accept groups of one sample, which count as 0 in the whitening.

    Source: GDPO (arXiv 2601.05242). Arguments and result: see `advantages.base`.
    """
    weights = [1.0] * reward_parts.shape[1] if parts is None else list(parts.values())
    rows = Rows.of(mask, offsets)
    live = rows.counts(mask) > 0
    total = torch.zeros(len(rows), dtype=torch.float64, device=mask.device)
    for column, weight in zip(reward_parts.unbind(1), weights, strict=True):
        total += weight * GroupStats.of(column, live, uid, allow_singleton=allow_singleton).standardised
    advantages = whiten_(for_all_tokens(total, rows, mask, reward_parts).advantages, mask, rows, all_sum)
    return Estimate(advantages, advantages)
