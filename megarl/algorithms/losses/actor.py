"""The whole objective of the policy: policy loss, entropy bonus, KL term, each a weighted sum over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.kl import kl_tokens
from megarl.algorithms.losses.base import POLICY_LOSSES
from megarl.metrics import Metrics


class ActorSettings(Protocol):
    """What the objective reads from `algorithm.loss`; the loss of that name reads its own settings from it, too."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def entropy_coef(self) -> float: ...  # noqa: D102


class KLSettings(Protocol):
    """What the objective reads from `algorithm.kl`."""

    @property
    def estimator(self) -> str: ...  # noqa: D102
    @property
    def coef(self) -> float: ...  # noqa: D102


def actor_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    cfg: ActorSettings,
    *,
    tokens: float,
    offsets: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl: KLSettings | None = None,
    prepared: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Metrics]:
    """sum(w loss) - entropy_coef sum(w entropy) + kl.coef sum(w kl): this part's share of the mini-batch's loss.

    Args:
        logp: float [N] or [B, T], differentiable.
        old_logp: same shape.
        advantages: same shape.
        mask: bool, same shape.
        weights: same shape, from `aggregation_weights`.
        cfg: policy loss and its settings.
        tokens: valid tokens of the whole mini-batch over all ranks; the metrics need it.
        offsets: int64 [B + 1] for the packed form.
        entropy: same shape, differentiable when it is to be a bonus; None: none.
        ref_logp: same shape; needed when `kl` is given.
        kl: estimator and coefficient of the KL term; None: no KL in the loss.
        prepared: this part of what `preparation_of(loss)` made of the mini-batch, for losses that have one.

    Returns:
        Scalar loss, and metrics. An empty or fully masked part gives zero, with zero gradients.
    """
    loss_fn = POLICY_LOSSES.get(cfg.name)
    token_loss, metrics = loss_fn(logp, old_logp, advantages, mask, cfg, offsets=offsets, **(prepared or {}))
    policy = (weights * token_loss).sum()
    loss = policy
    sums = [mask.sum().double(), policy.detach().double()]
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0)
        sums.append(entropy.detach().double().sum())
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * (weights * entropy).sum()
    if kl is not None:
        if ref_logp is None:
            raise ValueError("a KL term needs ref_logp")
        distance = kl_tokens(kl.estimator, logp, ref_logp, mask)
        sums.append(distance.detach().double().sum())
        loss = loss + kl.coef * (weights * distance).sum()
    count, policy_sum, *rest = torch.stack(sums).tolist()
    if count:
        # The counts of all parts add up to 1 per mini-batch, so several mini-batches average.
        metrics.mean("actor/pg_loss", policy_sum, count / max(tokens, 1.0))
        if entropy is not None:
            metrics.mean("actor/entropy", rest[0], count)
        if kl is not None:
            metrics.mean("actor/kl_loss", rest[-1], count)
            metrics.mean("actor/kl_coef", kl.coef * count, count)
    return loss, metrics
