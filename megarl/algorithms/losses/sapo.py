"""Soft gate instead of a clip (SAPO)."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs
from megarl.algorithms.registry import Settings
from megarl.system.metrics import Metrics


class SapoSettings(Settings):
    """The temperatures of SAPO's sigmoid gate on the ratio, which takes the place of a clip."""

    tau_pos: PositiveFloat = Field(1.0, description="temperature of the gate where A > 0")
    tau_neg: PositiveFloat = Field(1.05, description="temperature of the gate where A <= 0")


@POLICY_LOSSES.register("sapo", settings=SapoSettings)
def sapo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: SapoSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos for A > 0 and tau_neg otherwise.

    At r = 1 the gradient is that of the policy gradient; it fades on both sides, faster for larger tau.

    Source: Soft Adaptive Policy Optimization (arXiv 2511.20347). Arguments and result: see `losses.base`.

    >>> from types import SimpleNamespace
    >>> cfg, ones = SimpleNamespace(tau_pos=1.0, tau_neg=1.05), torch.ones(1)
    >>> sapo(torch.zeros(1), torch.zeros(1), ones, ones.bool(), cfg)[0]  # -4 sigmoid(0)
    tensor([-2.])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    tau = torch.full_like(p.ratio, cfg.tau_neg).masked_fill(p.advantages > 0, cfg.tau_pos)
    gate = torch.sigmoid(tau * (p.ratio - 1)) * (4 / tau)
    return -p.advantages * gate, p.metrics()
