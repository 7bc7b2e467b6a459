"""Clip-Cov and KL-Cov: keep entropy up by restraining the few tokens with the largest covariance of log-prob and A."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megarl.algorithms.kl import absolute
from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, DualClipSettings, LossInputs, capped_ratio
from megarl.algorithms.losses.ppo import clipped_surrogate
from megarl.algorithms.registry import Settings
from megarl.algorithms.select import descending, smallest
from megarl.algorithms.stats import AllSum, one_rank
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics


class FractionSettings(Settings):
    """The share of the mini-batch's tokens that get no gradient (`clip_cov`) or a penalty (`kl_cov`)."""

    cov_fraction: float = Field(2e-4, gt=0, le=1, description="share of tokens that are restrained")


class ClipCovSettings(FractionSettings, DualClipSettings):
    """The clip range, and the range of covariances from which the loss chooses tokens that get no gradient."""

    cov_low: float = Field(1.0, description="smallest covariance of a token that may be chosen")
    cov_high: float = Field(5.0, description="largest covariance of a token that may be chosen")

    def problems(self, path: str) -> list[ConfigError]:
        """Return an error if the settings `cov_low` and `cov_high` leave no covariance between them."""
        if self.cov_low < self.cov_high:
            return []
        problem = ConfigError(
            "no covariance lies between cov_low and cov_high",
            where=f"{path}.cov_low",
            found=self.cov_low,
            allowed=f"number < {self.cov_high}",
            fix="swap cov_low and cov_high" if self.cov_low > self.cov_high else f"lower {path}.cov_low",
        )
        return [problem]


class KLCovSettings(FractionSettings):
    """Settings of KL-Cov; the paper has no `ratio_cap`."""

    cov_kl_coef: NonNegativeFloat = Field(1.0, description="weight of the penalty on the chosen tokens")
    ratio_cap: PositiveFloat | None = Field(
        None, gt=1, description="largest ratio that a token's gradient is weighted with; null: no bound"
    )


def covariances(old_logp: Tensor, advantages: Tensor, mask: Tensor, all_sum: AllSum = one_rank) -> tuple[Tensor, int]:
    """Return (logp - mean)(A - mean) of each token, float64, 0 where masked, and the number of valid tokens of all
    ranks.

    Means are over all ranks.
    """
    x, y = torch.where(mask, old_logp, 0).double(), torch.where(mask, advantages, 0).double()
    count, x_sum, y_sum = all_sum(torch.stack([mask.sum(), x.sum(), y.sum()]).cpu()).tolist()
    tokens = max(count, 1.0)
    return torch.where(mask, (x - x_sum / tokens) * (y - y_sum / tokens), 0), int(count)


def choose_between(
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: ClipCovSettings,
    *,
    keys: Tensor,
    all_sum: AllSum = one_rank,
) -> dict[str, Tensor]:
    """Select floor(cov_fraction * tokens), at least one, random tokens with cov_low < covariance < cov_high."""
    cov, tokens = covariances(old_logp, advantages, mask, all_sum)
    candidates = mask & (cov > cfg.cov_low) & (cov < cfg.cov_high)
    return {"selected": smallest(keys, candidates, max(1, int(cfg.cov_fraction * tokens)), all_sum)}


def take_largest(
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: FractionSettings,
    *,
    keys: Tensor,
    all_sum: AllSum = one_rank,
) -> dict[str, Tensor]:
    """Select the floor(cov_fraction * tokens), at least one, tokens with the largest positive covariance."""
    cov, tokens = covariances(old_logp, advantages, mask, all_sum)
    positive = mask & (cov > 0)
    # Round to float32: values that differ only by the order of summation mostly become equal and are selected together.
    ranked = descending(cov.clamp(min=0).float())
    return {"selected": smallest(ranked, positive, max(1, int(cfg.cov_fraction * tokens)), all_sum)}


@POLICY_LOSSES.register("clip_cov", settings=ClipCovSettings, prepare=choose_between)
def clip_cov(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: ClipCovSettings,
    *,
    selected: Tensor,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute the loss of `ppo`, zero for the tokens that `choose_between` selected.

    Covariances use old_logp, so the selection does not depend on the split of the mini-batch into micro-batches; the
    paper uses the current policy.

    Args:
        cfg: clip_low, clip_high, dual_clip; `choose_between` uses cov_fraction, cov_low, cov_high.
        selected: bool, same shape, from `choose_between`.

    Returns:
        Token loss, zero where the mask is False, and metrics; pg_clipfrac also counts selected tokens.

    Source: The Entropy Mechanism of RL for Reasoning LLMs (arXiv 2505.22617), Clip-Cov. Arguments and result: see
    `losses.base`.
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    loss, clipped, lower = clipped_surrogate(p.ratio, p.advantages, cfg)
    return torch.where(selected, 0, loss), p.metrics(clipped | selected, lower)


@POLICY_LOSSES.register("kl_cov", settings=KLCovSettings, prepare=take_largest)
def kl_cov(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: KLCovSettings,
    *,
    selected: Tensor,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -A r without a clip, plus cov_kl_coef |logp - old_logp| for the tokens that `take_largest` selected.

    In the paper nothing bounds r: a token that was nearly impossible before may dominate a step. `ratio_cap` truncates
    r as in `dppo_tv`.

    Arguments and covariances as in `clip_cov`; cfg has cov_kl_coef and ratio_cap, and cov_fraction for the selection.
    pg_clipfrac is the share of selected tokens, pg_clipfrac_lower the share of tokens with a truncated ratio.

    Source: The Entropy Mechanism of RL for Reasoning LLMs (arXiv 2505.22617), KL-Cov.
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    penalty = cfg.cov_kl_coef * absolute(p.log_ratio)
    ratio, truncated = capped_ratio(p, cfg.ratio_cap)
    return torch.where(selected & mask, penalty, 0) - p.advantages * ratio, p.metrics(selected, truncated)
