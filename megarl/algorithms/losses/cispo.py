"""Clipped importance weights that leave every token its gradient (CISPO)."""

from __future__ import annotations

from megarl.algorithms.lazy import Tensor
from megarl.algorithms.losses.base import POLICY_LOSSES, ClipSettings, LossInputs
from megarl.system.metrics import Metrics


@POLICY_LOSSES.register("cispo", settings=ClipSettings)
def cispo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: ClipSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -sg(clip(r, 1 - low, 1 + high)) A logp.

    The clip bounds the weight r; no token loses its gradient. `clip_low` of 1 or more means no lower bound.

    Source: MiniMax-M1 (arXiv 2506.13585). Arguments and result: see `losses.base`.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> cfg, logp = SimpleNamespace(clip_low=0.2, clip_high=0.2), torch.tensor([0.5]).log()
    >>> cispo(logp, torch.tensor([0.25]).log(), torch.ones(1), torch.ones(1, dtype=torch.bool), cfg)[0]  # 1.2 log 2
    tensor([0.8318])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    ratio = p.ratio.detach()
    weight = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return -weight * p.advantages * p.logp, p.metrics(weight != ratio)
