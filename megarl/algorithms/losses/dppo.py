"""Trust region instead of a ratio clip (DPPO), by total variation or KL."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs, capped_ratio, probabilities
from megarl.algorithms.registry import Settings
from megarl.system.metrics import Metrics


class TrustRegionSettings(Settings):
    """The trust region of a token's probability, and the largest weight of its gradient."""

    trust_region: PositiveFloat = Field(0.15, description="largest divergence of a token")
    ratio_cap: PositiveFloat | None = Field(
        20.0, gt=1, description="largest ratio that a token's gradient is weighted with; null: no bound"
    )


@POLICY_LOSSES.register("dppo_tv", settings=TrustRegionSettings)
def dppo_tv(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: TrustRegionSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -A r, without gradient if |pi - old| > trust_region already and A pushes the token further away.

    |pi - old| is the total variation of the two-outcome distribution (sampled token, all others). A ratio clip stops
    rare tokens early and common ones late; this region bounds the probability mass that moves. The ratio of a nearly
    impossible token can be millions while hardly any mass moves, so r is truncated at ratio_cap: see `capped_ratio`.

    Returns:
        Token loss, zero where masked or outside the region, and metrics; pg_clipfrac_lower is the share of tokens
        whose ratio was truncated.

    Source: Rethinking the Trust Region in LLM RL (arXiv 2602.04879), binary divergence; truncation: section 5.4.
    Arguments and result: see `losses.base`.

    >>> from types import SimpleNamespace
    >>> cfg, ones = SimpleNamespace(trust_region=0.2, ratio_cap=20.0), torch.ones(2)
    >>> dppo_tv(torch.tensor([0.9, 0.2]).log(), torch.tensor([0.6, 0.1]).log(), ones, ones.bool(), cfg)[0]
    tensor([-0., -2.])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    new, old = probabilities(p)
    return _inside(p, (new - old).abs() > cfg.trust_region, cfg.ratio_cap)


@POLICY_LOSSES.register("dppo_kl", settings=TrustRegionSettings)
def dppo_kl(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: TrustRegionSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute `dppo_tv` with the divergence KL(old || pi) of the two-outcome distribution (sampled token, all others).

    It is old log(old / pi) + (1 - old) log((1 - old) / (1 - pi)). Arguments and source as in `dppo_tv`.

    >>> from types import SimpleNamespace
    >>> cfg, ones = SimpleNamespace(trust_region=0.1, ratio_cap=20.0), torch.ones(2)
    >>> dppo_kl(torch.tensor([0.9, 0.2]).log(), torch.tensor([0.6, 0.1]).log(), ones, ones.bool(), cfg)[0]
    tensor([-0., -2.])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    new, old = probabilities(p)
    # This term is infinite where 1 - new rounds to 0, unless 1 - old does, too: then the term is 0.
    others = torch.special.xlogy(1 - old, 1 - old) - torch.special.xlogy(1 - old, 1 - new)
    return _inside(p, -old * p.difference.detach() + others > cfg.trust_region, cfg.ratio_cap)


def _inside(p: LossInputs, far: Tensor, cap: float | None) -> tuple[Tensor, Metrics]:
    """Compute the loss -A r, with the ratio r truncated at `cap`. It is 0 for tokens on which the policy is already
    `far` from the old policy, if the advantage A would push it further away."""
    outward = torch.where(p.advantages > 0, p.log_ratio > 0, p.log_ratio < 0) & (p.advantages != 0)
    stopped = far & outward
    ratio, truncated = capped_ratio(p, cap)
    return -p.advantages * torch.where(stopped, 0, ratio), p.metrics(stopped, truncated & ~stopped)
