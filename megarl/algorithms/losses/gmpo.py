"""Geometric mean of token ratios (GMPO)."""

from __future__ import annotations

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs, SequenceClipSettings
from megarl.algorithms.rows import Rows
from megarl.system.metrics import Metrics


@POLICY_LOSSES.register("gmpo", settings=SequenceClipSettings, per_sequence=True)
def gmpo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: SequenceClipSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -A s, s = exp(mean over the sequence of sign(A) min(sign(A) d, sign(A) clip(d, -low, high))), d the
    log-ratio.

    The clip is per token, in log space; A is the mean advantage of the sequence's tokens. Every valid token gets its
    sequence's loss, so aggregation seq-mean-token-mean gives the paper's mean over sequences; its clip range is 0.4.
    For A < 0 only `dual_clip` bounds s from above.

    Args:
        cfg: clip_low, clip_high (of the log-ratio); dual_clip (of s).

    Source: Geometric-Mean Policy Optimization (arXiv 2507.20673). Arguments and result: see `losses.base`.

    >>> from types import SimpleNamespace
    >>> cfg = SimpleNamespace(clip_low=0.4, clip_high=0.4, dual_clip=None)
    >>> logp = torch.tensor([[0.2, 0.8]])  # 0.8 is clipped to 0.4
    >>> gmpo(logp, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), cfg)[0]  # -exp(0.3)
    tensor([[-1.3499, -1.3499]])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    rows = Rows.of(mask, offsets)
    sign = p.advantages.sign()
    near = p.log_ratio.clamp(-cfg.clip_low, cfg.clip_high)
    used = sign * torch.minimum(sign * p.log_ratio, sign * near)
    length = rows.counts(mask).clamp(min=1)
    ratio = (rows.sum(used) / length).exp()
    advantage = rows.sum(p.advantages) / length
    loss, lower = -advantage * ratio, None
    if cfg.dual_clip is not None:
        bounded = (advantage < 0) & (ratio > cfg.dual_clip)
        loss = torch.where(bounded, -advantage * cfg.dual_clip, loss)
        lower = rows.spread(bounded.float(), mask) > 0
    clipped = (used != p.log_ratio) & (sign != 0)
    return rows.spread(loss, mask), p.metrics(clipped, lower, rows.spread(ratio, mask))
