"""Sequence weights shaped by a gamma kernel (VESPO)."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import LIMIT, POLICY_LOSSES, LossInputs
from megarl.algorithms.registry import Settings
from megarl.algorithms.rows import Rows
from megarl.system.metrics import Metrics


class VespoSettings(Settings):
    """Shape k and rate lambda of the kernel that turns ratios into weights, for each sign of the advantage A. The
    weight is largest at a ratio of k / lambda."""

    k_pos: PositiveFloat = Field(2.0, description="shape of the kernel where A >= 0")
    lambda_pos: PositiveFloat = Field(3.0, description="rate of the kernel where A >= 0")
    k_neg: PositiveFloat = Field(3.0, description="shape of the kernel where A < 0")
    lambda_neg: PositiveFloat = Field(2.0, description="rate of the kernel where A < 0")


@POLICY_LOSSES.register("vespo", settings=VespoSettings, mode="bypass")
def vespo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: VespoSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -sg(phi(W)) A logp, phi(W) = W^k exp(lambda (1 - W)), W = exp(sum of the sequence's log-ratios).

    phi is 1 at W = 1 and falls to 0 for sequences that have become much more or much less likely, so that W needs no
    clip and no division by the length. The metrics of the ratio are those of W.

    Source: VESPO (arXiv 2602.10693) with the authors' defaults (FloyedShen/VESPO). They take the sign of A from the
    first token; here each token has its own. Arguments and result: see `losses.base`.

    >>> from types import SimpleNamespace
    >>> cfg = SimpleNamespace(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0)
    >>> logp = torch.tensor([[0.5, 0.4]]).log()  # W = 0.8
    >>> loss, _ = vespo(logp, torch.tensor([[0.5, 0.5]]).log(), torch.ones(1, 2), torch.ones(1, 2).bool(), cfg)
    >>> loss / -logp
    tensor([[1.1662, 1.1662]])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    rows = Rows.of(mask, offsets)
    log_w = rows.spread(rows.sum(p.difference.detach()).clamp(-LIMIT, LIMIT), mask)
    w = log_w.exp()
    up, down = (
        (rate + k * log_w - rate * w).exp() for k, rate in ((cfg.k_pos, cfg.lambda_pos), (cfg.k_neg, cfg.lambda_neg))
    )
    weight = torch.where(p.advantages >= 0, up, down)
    return -weight * p.advantages * p.logp, p.metrics(ratio=w)
