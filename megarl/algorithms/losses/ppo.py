"""Clipped surrogate (PPO), with separate bounds (DAPO) and dual clip."""

from __future__ import annotations

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import (
    POLICY_LOSSES,
    DualClipSettings,
    LossInputs,
    SequenceClipSettings,
)
from megarl.system.metrics import Metrics


@POLICY_LOSSES.register("ppo", settings=DualClipSettings)
def ppo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: DualClipSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute max(-A r, -A clip(r, 1 - low, 1 + high)), and at most -A c where A < 0; r = exp(clamp(logp - old_logp,
    +-20)).

    Args:
        cfg: clip_low, clip_high (0 is legal), dual_clip (c > 1, or None).

    Source: PPO (arXiv 1707.06347), dual clip (arXiv 1912.09729), clip-higher (arXiv 2503.14476). Arguments and result:
    see `losses.base`.

    >>> from types import SimpleNamespace
    >>> cfg = SimpleNamespace(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    >>> logp = torch.log(torch.tensor([1.5, 0.5, 5.0]))
    >>> ppo(logp, torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), torch.ones(3, dtype=torch.bool), cfg)[0]
    tensor([-1.2000,  0.8000,  3.0000])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    loss, clipped, lower = clipped_surrogate(p.ratio, p.advantages, cfg)
    return loss, p.metrics(clipped, lower)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, cfg: DualClipSettings | SequenceClipSettings
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the token loss, which tokens the clip stopped, and which tokens the dual clip bounded (None if it is
    off)."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    clipped = bounded > plain
    # The branch of `where` keeps the whole gradient at the bound, where torch 2.14's clamp has none.
    loss = torch.where(clipped, bounded, plain)
    if cfg.dual_clip is None:
        return loss, clipped, None
    ceiling = -advantages * cfg.dual_clip
    lower = (advantages < 0) & (ceiling < loss)
    return torch.where(lower, ceiling, loss), clipped, lower
