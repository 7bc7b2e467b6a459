"""Clipped log-ratio with a penalty on policy drift (CPGD)."""

from __future__ import annotations

import math

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, ClipSettings, LossInputs
from megarl.system.metrics import Metrics


class DriftSettings(ClipSettings):
    """The clip range, and the weight and limit of the term that pulls the policy back to the old policy."""

    drift_coef: NonNegativeFloat = Field(0.1, description="weight of the policy drift")
    drift_clip: PositiveFloat = Field(0.2, description="the drift's pull grows up to a ratio of 1 + this")


@POLICY_LOSSES.register("cpgd", settings=DriftSettings)
def cpgd(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: DriftSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -min(A d, A clip(d, log(1 - low), log(1 + high))) + drift_coef min(sg(r) - 1, drift_clip) logp, d = log
    r.

    The log-ratio has a lower variance on old samples than the ratio; the drift term pulls back tokens that the clip
    does not affect. The drift term's gradient is that of the k3 estimate of KL(old || pi), r - 1 - d, with r limited to
    1 + drift_clip: limiting the estimate itself would release the tokens that drifted most. Its value has no meaning.

    Source: CPGD (arXiv 2505.12504), equation 2 with one clip range for all tokens, and equation 5 for the drift.
    Arguments and result: see `losses.base`.

    >>> from types import SimpleNamespace
    >>> cfg = SimpleNamespace(clip_low=0.5, clip_high=1.0, drift_coef=0.0, drift_clip=0.2)
    >>> cpgd(torch.tensor([1.0]), torch.zeros(1), torch.ones(1), torch.ones(1, dtype=torch.bool), cfg)[0]  # -log 2
    tensor([-0.6931])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    lowest = math.log(1 - cfg.clip_low) if cfg.clip_low < 1 else -math.inf
    plain = -p.advantages * p.log_ratio
    bounded = -p.advantages * p.log_ratio.clamp(lowest, math.log1p(cfg.clip_high))
    drift = (p.ratio.detach() - 1).clamp(max=cfg.drift_clip) * p.logp
    return torch.maximum(plain, bounded) + cfg.drift_coef * drift, p.metrics(bounded > plain)
