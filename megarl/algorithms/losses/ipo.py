"""Policy gradient on the tokens whose probability is near the engine's, with a squared log-ratio on all (IPO, KPop)."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs, capped_ratio, probabilities
from megarl.algorithms.losses.dppo import TrustRegionSettings
from megarl.system.metrics import Metrics


class TwoSidedSettings(TrustRegionSettings):
    """The trust region of a token's probability for either sign of A, and the weight of the squared log-ratio."""

    trust_region: PositiveFloat = Field(0.1, description="largest divergence of a token, whatever the sign of A")
    kl_tau: NonNegativeFloat = Field(1e-3, description="weight of the squared log-ratio of every token")


@POLICY_LOSSES.register("ipo", settings=TwoSidedSettings, mode="bypass")
def ipo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: TwoSidedSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -A r if |pi - old| <= trust_region, else 0; plus kl_tau d^2 for every token, d = log r.

    Unlike `dppo_tv` it also stops tokens that A moves back towards the old policy. With `mode: bypass` old is the
    engine's probability. r is truncated at ratio_cap as in `dppo_tv`; prime-rl has no bound.

    Returns:
        Token loss and metrics; pg_clipfrac is the share of tokens outside the region, pg_clipfrac_lower the share of
        tokens inside it with a truncated ratio.

    Source: prime-rl's default loss (PrimeIntellect-ai/prime-rl, pull request 3418). Arguments and result: see
    `losses.base`.

    >>> from types import SimpleNamespace
    >>> cfg, ones = SimpleNamespace(trust_region=0.2, kl_tau=0.0, ratio_cap=20.0), torch.ones(2)
    >>> ipo(torch.tensor([0.9, 0.2]).log(), torch.tensor([0.6, 0.1]).log(), -ones, ones.bool(), cfg)[0]
    tensor([0., 2.])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    new, old = probabilities(p)
    return _inside(p, (new - old).abs() <= cfg.trust_region, cfg)


@POLICY_LOSSES.register("kpop", settings=TwoSidedSettings, mode="bypass")
def kpop(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: TwoSidedSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute `ipo` with the divergence max(D(pi, old), D(old, pi)) of the two-outcome distribution (sampled token, all
    others).

    D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)). It is 0 if both probabilities round to 1, and infinite if
    only one of them does. AReaL instead applies this region to the old policy's importance weights.

    Source: KPop (ringtech.notion.site/kpop), in the form of prime-rl's pull request 3283. Arguments and result: see
    `ipo`.

    >>> from types import SimpleNamespace
    >>> cfg, ones = SimpleNamespace(trust_region=0.1, kl_tau=0.0, ratio_cap=20.0), torch.ones(3)
    >>> kpop(torch.tensor([0.9, 0.2, 1.0]).log(), torch.tensor([0.6, 0.1, 1.0]).log(), -ones, ones.bool(), cfg)[0]
    tensor([0., 2., 1.])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    new, change = p.logp.detach().clamp(max=0), p.difference.detach()
    old = (p.logp.detach() - change).clamp(max=0)
    # expm1 keeps the digits of 1 - p where p is nearly 1.
    new_others, old_others = -new.expm1(), -old.expm1()
    forward = new.exp() * change + _excess(new_others, old_others)
    backward = -old.exp() * change + _excess(old_others, new_others)
    return _inside(p, torch.maximum(forward, backward) <= cfg.trust_region, cfg)


def _excess(x: Tensor, y: Tensor) -> Tensor:
    """Return x log(x / y); 0 if x is 0."""
    return torch.special.xlogy(x, x) - torch.special.xlogy(x, y)


def _inside(p: LossInputs, kept: Tensor, cfg: TwoSidedSettings) -> tuple[Tensor, Metrics]:
    ratio, truncated = capped_ratio(p, cfg.ratio_cap)
    loss = torch.where(kept, -p.advantages * ratio, 0) + cfg.kl_tau * p.log_ratio.square()
    return loss, p.metrics(~kept, truncated & kept)
