"""Sequence-level ratio and clip (GSPO)."""

from __future__ import annotations

from megarl.algorithms.lazy import Tensor
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs, SequenceClipSettings
from megarl.algorithms.losses.ppo import clipped_surrogate
from megarl.algorithms.rows import Rows
from megarl.system.metrics import Metrics


@POLICY_LOSSES.register("gspo", settings=SequenceClipSettings, per_sequence=True)
def gspo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: SequenceClipSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean over the sequence of the log-ratio).

    All tokens of a sequence are clipped together. The gradient of s reaches each token through s_t = sg(s) pi_t /
    sg(pi_t), so token-level advantages work as well. The paper averages within sequences (aggregation
    seq-mean-token-mean), with clip ranges of about 3e-4 and 4e-4. For A < 0 only `dual_clip` bounds s from above.

    Source: GSPO (arXiv 2507.18071), GSPO-token. Arguments and result: see `losses.base`.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> cfg, logp = SimpleNamespace(clip_low=0.2, clip_high=0.2, dual_clip=None), torch.tensor([[4.0, 1.0]]).log()
    >>> gspo(logp, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), cfg)[0]  # s = sqrt(4 * 1)
    tensor([[-1.2000, -1.2000]])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    rows = Rows.of(mask, offsets)
    mean = rows.sum(p.log_ratio.detach()) / rows.counts(mask).clamp(min=1)
    # Use the clamped log-ratio, so that a token beyond the clamp has no gradient, as in `ppo`.
    ratio = (p.log_ratio - p.log_ratio.detach() + rows.spread(mean, mask)).exp()
    loss, clipped, lower = clipped_surrogate(ratio, p.advantages, cfg)
    return loss, p.metrics(clipped, lower, ratio)
