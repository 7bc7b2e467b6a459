"""What all policy losses share: the registry, the clean log-ratio, and the metrics of a clipped ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.registry import Registry
from megarl.metrics import Metrics

#: fn(logp, old_logp, advantages, mask, cfg, *, offsets) -> (token loss in the shape of mask, Metrics)
POLICY_LOSSES = Registry("policy loss", "algorithm.loss.name")

_LIMIT = 20.0


class LossSettings(Protocol):
    """What policy losses read from `algorithm.loss`."""

    @property
    def clip_low(self) -> float: ...  # noqa: D102
    @property
    def clip_high(self) -> float: ...  # noqa: D102
    @property
    def dual_clip(self) -> float | None: ...  # noqa: D102


@dataclass(frozen=True)
class Prologue:
    """Inputs of a policy loss, safe everywhere: zero (ratio: one) where the mask hides.

    Attributes:
        log_ratio: clamp(logp - old_logp, -20, 20), differentiable in logp.
        ratio: its exponential.
        advantages: without gradient.
        mask: bool.
    """

    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    def of(cls, logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Prologue:
        """All inputs have one shape, [N] or [B, T]."""
        # where, not a product with the mask: NaN * 0 is NaN.
        log_ratio = torch.where(mask, logp - old_logp.detach(), 0).clamp(-_LIMIT, _LIMIT)
        return cls(log_ratio, log_ratio.exp(), torch.where(mask, advantages.detach(), 0), mask)

    @torch.no_grad()
    def metrics(self, clipped: Tensor | None = None, lower: Tensor | None = None) -> Metrics:
        """Ratio statistics over valid tokens, and the shares that `clipped` and `lower` (bool) mark."""
        metrics, mask, ratio = Metrics(), self.mask, self.ratio.detach()
        if mask.numel() == 0:
            return metrics
        none = torch.zeros_like(mask)
        numbers = torch.stack(
            [
                mask.sum().double(),
                -self.log_ratio.sum().double(),
                torch.where(mask, ratio, 0).sum().double(),
                torch.where(mask, ratio, torch.inf).min().double(),
                torch.where(mask, ratio, -torch.inf).max().double(),
                (mask & (none if clipped is None else clipped)).sum().double(),
                (mask & (none if lower is None else lower)).sum().double(),
            ]
        )
        # One transfer for all of them: each would stall a GPU on its own.
        count, kl, total, least, most, n_clipped, n_lower = numbers.tolist()
        if count == 0:
            return metrics
        metrics.mean("actor/ppo_kl", kl, count)
        metrics.min("actor/ratio_min", least)
        metrics.mean("actor/ratio_mean", total, count)
        metrics.max("actor/ratio_max", most)
        metrics.mean("actor/pg_clipfrac", n_clipped, count)
        metrics.mean("actor/pg_clipfrac_lower", n_lower, count)
        return metrics
