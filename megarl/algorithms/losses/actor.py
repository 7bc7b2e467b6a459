"""The whole objective of the policy: policy loss, entropy bonus, KL term, each a weighted sum over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from megarl.algorithms.kl import kl_tokens
from megarl.algorithms.lazy import torch
from megarl.algorithms.losses.base import POLICY_LOSSES
from megarl.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.config.algorithm import PolicyLossConfig


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
    cfg: PolicyLossConfig,
    *,
    tokens: float,
    offsets: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl: KLSettings | None = None,
    teacher_logp: Tensor | None = None,
    distillation: KLSettings | None = None,
    fields: Mapping[str, Any] | None = None,
    is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """sum(w c loss) - entropy_coef sum(w entropy) + kl.coef sum(w kl) + distillation.coef sum(w KL to the teacher).

    Args:
        logp: float [N] or [B, T], differentiable.
        old_logp, advantages: same shape.
        mask: bool, same shape.
        weights: same shape, from `aggregation_weights`.
        cfg: `algorithm.loss`: the policy loss, its settings, and entropy_coef.
        tokens: valid tokens of the whole mini-batch over all ranks; the metrics need it.
        offsets: int64 [B + 1] for the packed form.
        entropy: same shape, differentiable when it is to be a bonus; None: none.
        ref_logp: same shape; needed when `kl` is given.
        kl: estimator and coefficient of the KL term; None: no KL in the loss.
        teacher_logp: same shape; needed when `distillation` is given.
        distillation: estimator and coefficient of the KL to the teacher; None: none.
        fields: this part of what the loss reads in addition, and of what its `prepare` made of the mini-batch.
        is_weights: same shape, the factors c of the policy loss (rollout correction); None: 1.

    Returns:
        Scalar, this part's share of the mini-batch's loss, and metrics. An empty or fully masked part gives zero, with
        zero gradients.
    """
    chosen = POLICY_LOSSES.choose(cfg)
    inputs = (logp, old_logp, advantages, mask, chosen.settings)
    token_loss, metrics = chosen.function(*inputs, offsets=offsets, **(fields or {}))
    if is_weights is not None:
        token_loss = is_weights.detach() * token_loss
    loss = (weights * token_loss).sum()
    sums = {"count": mask.sum(), "policy": loss.detach()}  # the count first
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0)
        sums["entropy"] = entropy.detach().double().sum()
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * (weights * entropy).sum()
    coefs = {}
    for name, settings, anchor_logp in (("kl", kl, ref_logp), ("distillation", distillation, teacher_logp)):
        if settings is not None:
            distance = _distance(name, settings, logp, anchor_logp, mask)
            sums[name], coefs[name] = distance.detach().double().sum(), settings.coef
            loss = loss + settings.coef * (weights * distance).sum()
    _record(metrics, sums, coefs, tokens)
    return loss, metrics


def _distance(name: str, settings: KLSettings, logp: Tensor, anchor_logp: Tensor | None, mask: Tensor) -> Tensor:
    """KL of every token to the model of the term `name`, which must have given its log-probs."""
    if anchor_logp is None:
        raise ValueError(f"a {name} term needs the log-probs of its model")
    return kl_tokens(settings.estimator, logp, anchor_logp, mask)


def _record(metrics: Metrics, sums: dict[str, Tensor], coefs: dict[str, float], tokens: float) -> None:
    """Metrics of the terms, out of scalar sums over this part's valid tokens; nothing when it has none."""
    count, *values = torch.stack([value.double() for value in sums.values()]).tolist()
    numbers = dict(zip(list(sums)[1:], values, strict=True))
    if not count:
        return
    # The counts of all parts add up to 1 per mini-batch, so several mini-batches average.
    metrics.mean("actor/pg_loss", numbers["policy"], count / max(tokens, 1.0))
    if "entropy" in numbers:
        metrics.mean("actor/entropy", numbers["entropy"], count)
    for name, coef in coefs.items():
        metrics.mean(f"actor/{name}_loss", numbers[name], count)
        metrics.mean(f"actor/{name}_coef", coef * count, count)
