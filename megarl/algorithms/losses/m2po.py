"""Policy gradient within a bound of the second moment of the log-ratio (M2PO)."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs, capped_ratio
from megarl.algorithms.registry import Settings
from megarl.algorithms.select import within_mean
from megarl.algorithms.stats import AllSum, one_rank
from megarl.system.metrics import Metrics


class SecondMomentSettings(Settings):
    """The bound of the mean squared log-ratio (second moment), and the largest weight of a token's gradient."""

    second_moment: PositiveFloat = Field(
        0.04, description="largest mean of the squared log-ratio over trained tokens that A moves away from the engine"
    )
    ratio_cap: PositiveFloat | None = Field(
        20.0, gt=1, description="largest ratio that a token's gradient is weighted with; null: no bound"
    )


def drop_farthest(
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: SecondMomentSettings,
    *,
    rollout_logp: Tensor,
    keys: Tensor | None = None,
    all_sum: AllSum = one_rank,
) -> dict[str, Tensor]:
    """Select the tokens to stop: of those with A d > 0, d = old_logp - rollout_logp, the ones with the largest d^2,
    until the mean d^2 of the rest is at most `second_moment`.
    """
    d = torch.where(mask, old_logp.double() - rollout_logp.double(), 0)
    outward = mask & (torch.where(mask, advantages, 0) * d > 0)
    return {"stopped": outward & ~within_mean(d.square(), outward, cfg.second_moment, all_sum)}


@POLICY_LOSSES.register("m2po", settings=SecondMomentSettings, prepare=drop_farthest, mode="decoupled")
def m2po(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: SecondMomentSettings,
    *,
    stopped: Tensor,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -A r, r = pi / pi_rollout truncated at ratio_cap as in `dppo_tv`; 0 for the tokens that
    `drop_farthest` selected.

    On stale samples a bound of each token's ratio stops many tokens; one bound of the mini-batch's second moment stops
    only the outliers. The authors' code differs from their algorithm: it clips r, and leaves every r within
    [0.7, 1.5] unclipped.

    Args:
        old_logp: log-probs of the generation engine.
        stopped: bool, same shape, from `drop_farthest`.

    Returns:
        Token loss and metrics; pg_clipfrac is the share of stopped tokens.

    Source: M2PO (arXiv 2510.01161), algorithm 1. Arguments and result: see `losses.base`.
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    ratio, truncated = capped_ratio(p, cfg.ratio_cap)
    return -p.advantages * torch.where(stopped, 0, ratio), p.metrics(stopped, truncated & ~stopped)
