"""Policy gradient with importance weights against the policy that sampled (rollout correction in bypass mode)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from megarl.algorithms.lazy import Tensor
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from megarl.algorithms.correction.ratios import Threshold


class PolicyGradientSettings(Protocol):
    """The settings that `pg_is` reads."""

    @property
    def is_level(self) -> str: ...  # noqa: D102
    @property
    def is_threshold(self) -> Threshold: ...  # noqa: D102


@POLICY_LOSSES.register("pg_is", corrects=True)
def pg_is(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyGradientSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -sg(w) logp A with weights w from rho = pi_theta / pi_rollout.

    `is_level` chooses w: min(prod rho, C) per sequence, min(rho, C) per token, or 1. Only the weight is clipped, so a
    token's gradient never vanishes.

    Args:
        old_logp: same shape, log-probs of the policy that sampled the tokens.
        cfg: is_level (sequence, token, or none: then the caller applies weights) and is_threshold, as in
            `importance_weights`.

    Source: off-policy REINFORCE with truncated weights, e.g. IMPALA (arXiv 1802.01561), and the mismatch analysis of
    Liu et al. 2025 ("When Speed Kills Stability"). Arguments and result: see `losses.base`.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> cfg = SimpleNamespace(is_level="sequence", is_threshold=2.0)
    >>> logp, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -3.0]])
    >>> pg_is(logp, old, torch.tensor([[1.0, 0.5]]), torch.ones(1, 2, dtype=torch.bool), cfg)[0]
    tensor([[2., 1.]])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    loss = -p.advantages * p.logp
    if cfg.is_level != "none":
        from megarl.algorithms.correction.ratios import Ratios, importance_weights

        ratios = Ratios.of(logp.detach(), old_logp.detach(), mask, offsets)
        weights = importance_weights(ratios, cfg.is_level, cfg.is_threshold)
        if cfg.is_level == "sequence":
            weights = ratios.rows.expand(weights)
        loss = weights.view(mask.shape) * loss
    return loss, p.metrics()
