"""Policy gradient on the policy's own and on expert responses (LUFFY)."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs, capped_ratio
from megarl.algorithms.registry import Settings
from megarl.algorithms.rows import at_least_float32
from megarl.system.metrics import Metrics


class LuffySettings(Settings):
    """The weights of expert tokens and of the policy's own."""

    gamma: PositiveFloat = Field(0.1, description="gamma in the weight p / (p + gamma) of an expert token")
    ratio_cap: PositiveFloat | None = Field(
        20.0, gt=1, description="the ratio r in -A*r is truncated at this value, also for A < 0; null: no bound"
    )


@POLICY_LOSSES.register("luffy", settings=LuffySettings, reads=["expert_mask"])
def luffy(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: LuffySettings,
    *,
    expert_mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -A f(p) for expert tokens, f(p) = p / (p + gamma), and -A r for the policy's own; neither has a clip.

    p is the policy's probability of the token: its ratio to an expert that is sure of the token (p / 1). The gradient
    in the log-prob is -A gamma p / (p + gamma)^2, largest at p = gamma, so that unlikely tokens of the expert are
    learnt, too. The metrics of the ratio are those of the policy's own tokens.

    Source: LUFFY (arXiv 2504.14945); the authors do not truncate r. Arguments and result: see `losses.base`.

    Args:
        expert_mask: bool, in the shape of `mask`: tokens of expert responses; None: there are none.

    >>> from types import SimpleNamespace
    >>> p, ones, cfg = torch.tensor([[0.05, 0.9]]), torch.ones(1, 2), SimpleNamespace(gamma=0.1, ratio_cap=None)
    >>> luffy(p.log(), p.log(), ones, ones.bool(), cfg, expert_mask=ones.bool())[0]
    tensor([[-0.3333, -0.9000]])
    """
    expert = torch.zeros_like(mask) if expert_mask is None else mask & expert_mask
    p = LossInputs.of(logp, old_logp, advantages, mask & ~expert)
    ratio, capped = capped_ratio(p, cfg.ratio_cap)
    metrics = p.metrics(lower=capped)
    chance = torch.where(expert, at_least_float32(logp), 0).exp()
    weight = torch.where(expert, chance / (chance + cfg.gamma), ratio)
    if tokens := int(expert.sum()):
        metrics.mean("actor/expert_prob", float(chance.detach()[expert].double().sum()), tokens)
    return -torch.where(mask, at_least_float32(advantages.detach()), 0) * weight, metrics
