"""PPO's loss without the sequences of negative advantage that are far off-policy (OPSM of DeepSeek-V3.2)."""

from __future__ import annotations

from pydantic import Field

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, DualClipSettings, LossInputs
from megarl.algorithms.losses.ppo import clipped_surrogate
from megarl.algorithms.rows import Rows
from megarl.system.metrics import Metrics


class OffPolicyMaskSettings(DualClipSettings):
    """The clip range, and how far a sequence with A < 0 may be from the policy that generated it."""

    off_policy_threshold: float = Field(
        0.1, ge=0, description="largest mean log(old / pi) of a sequence whose tokens with A < 0 are trained on"
    )


@POLICY_LOSSES.register("opsm", settings=OffPolicyMaskSettings, mode="bypass")
def opsm(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: OffPolicyMaskSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute the loss of `ppo`; 0 where A < 0 and the sequence's mean of log(old / pi) is above off_policy_threshold.

    A policy learns most from its own mistakes; the mistakes of a much older policy may destabilise it. With `mode:
    bypass` old is the engine's probability, as in the paper. Stopped tokens stay in the divisor of the aggregation.

    Returns:
        Token loss and metrics; pg_clipfrac also counts the tokens of stopped sequences.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), off-policy sequence masking; its threshold is not published. Arguments
    and result: see `losses.base`.

    >>> from types import SimpleNamespace
    >>> cfg = SimpleNamespace(clip_low=1.0, clip_high=0.2, dual_clip=None, off_policy_threshold=0.5)
    >>> logp, old = torch.tensor([[0.4, 0.2], [0.1, 0.1]]).log(), torch.full((2, 2), 0.5).log()
    >>> opsm(logp, old, -torch.ones(2, 2), torch.ones(2, 2).bool(), cfg)[0]  # means 0.57 and 1.61
    tensor([[0., 0.],
            [0., 0.]])
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    rows = Rows.of(mask, offsets)
    away = rows.sum(-p.difference.detach()) / rows.counts(mask).clamp(min=1)
    stopped = (p.advantages < 0) & (rows.spread(away, mask) > cfg.off_policy_threshold)
    loss, clipped, lower = clipped_surrogate(p.ratio, p.advantages, cfg)
    # Without a dual clip, `lower` (the tokens at that clip) is None.
    return torch.where(stopped, 0, loss), p.metrics(clipped | stopped, None if lower is None else lower & ~stopped)
