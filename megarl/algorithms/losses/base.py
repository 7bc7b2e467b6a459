"""Common parts of all policy losses: the registry, the masked log-ratio, and the metrics of a clipped ratio.

A policy loss is `fn(logp, old_logp, advantages, mask, cfg, *, offsets) -> (token loss, Metrics)`:

    logp         float [N] or [B, T], differentiable
    old_logp     same shape, before the update
    advantages   same shape
    mask         bool, same shape: valid tokens
    cfg          settings of the loss
    offsets      int64 [B + 1] for the packed form [N], which losses of whole sequences need

The token loss has the shape of `logp`, and is zero where the mask is False.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.registry import Chosen, Registry, Settings, Spec
from megarl.algorithms.rows import at_least_float32
from megarl.algorithms.user_code import check_tokens, form, from_users, misfit, name_of
from megarl.system.metrics import Metrics

#: fn(old_logp, advantages, mask, cfg, *, keys, all_sum) -> {keyword of the loss: tensor in the shape of mask}; further
#: keyword parameters without a default get the samples' fields of their names
Preparation: TypeAlias = "Callable[..., dict[str, Tensor]]"

LIMIT = 20.0


@dataclass(frozen=True)
class LossSpec(Spec):
    """The declaration of a policy loss."""

    # function that sees the whole mini-batch before it is split into micro-batches: this rank's part, `keys` (int64 in
    # the shape of mask, random per token) and `all_sum`. Its results are split like the other inputs and passed to the
    # loss as keyword arguments. It needs `old_logp`, and so a scoring pass.
    prepare: Preparation | None = None
    ratio_free: bool = False  # whether the loss lacks an importance ratio, which would correct for older samples
    # the mode of `rollout_correction` that the loss needs. bypass: the loss compares the policy with the engine,
    # whose log-probs are its `old_logp` in this mode only. decoupled: the engine's log-probs are its `old_logp` in any
    # mode, but its `prepare` also gets the trainer's before the update, and only in this mode. None: any mode
    mode: Literal["bypass", "decoupled"] | None = None
    per_sequence: bool = False  # the loss is one number per sequence, so aggregation should weigh sequences equally
    # `rollout_correction` with `loss: pg` replaces the recipe's loss by this loss, which uses its importance weights
    corrects: bool = False

    @property
    def prepare_reads(self) -> list[str]:
        """Names of the batch fields that the loss's function `prepare` takes as keyword arguments."""
        if self.prepare is None:
            return []
        parameters = inspect.signature(self.prepare).parameters.values()
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        return [name for name in keywords if name not in ("keys", "all_sum")]


#: Positional parameters of a policy loss.
_POSITIONAL = ("logp", "old_logp", "advantages", "mask", "cfg")
POLICY_LOSSES = Registry("policy loss", "algorithm.loss.name", LossSpec)


def checked_loss(
    function: Callable[..., Any], result: Any, logp: Tensor, mask: Tensor, inputs: Iterable[Any]
) -> tuple[Tensor, Metrics]:
    """Check the return value of a policy loss and return its token loss and metrics.

    Args:
        logp: the log-probs with which the loss was called.
        inputs: the loss's other inputs.
    """
    kind = POLICY_LOSSES.kind
    if not (isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Metrics)):
        raise misfit(
            kind,
            function,
            "does not return a pair (token loss, Metrics)",
            found=form(result),
            allowed="(token_loss, Metrics)",
            fix="return one number per token, and LossInputs.metrics() or an empty megarl.system.metrics.Metrics(); "
            "metrics.mean(name, sum, count) adds a metric to either",
        )
    token_loss, metrics = result
    check_tokens(kind, function, "loss", token_loss, mask, inputs=(logp, *inputs))
    if from_users(function) and logp.requires_grad and not token_loss.requires_grad and bool(mask.any()):
        raise misfit(
            kind,
            function,
            "returns a loss without a gradient, so nothing would be learnt",
            found=form(token_loss),
            allowed="a tensor that is computed from logp",
            fix="compute it from logp with gradients: without detach(), .data, .item() or torch.no_grad()",
        )
    return token_loss, metrics


def checked_preparation(chosen: Chosen[LossSpec], result: Any, mask: Tensor) -> dict[str, Tensor]:
    """Check the return value of a loss's `prepare` and return it: keyword arguments of the loss."""
    prepare, function = chosen.spec.prepare, chosen.function
    assert prepare is not None, "only called with the result of `prepare`"
    given = (*_POSITIONAL, "offsets", *chosen.spec.reads)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in given]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    allowed = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    required = {p.name for p in parameters if p.name in allowed and p.default is p.empty}
    named = isinstance(result, dict) and result.keys() >= required and (takes_any or result.keys() <= allowed)
    if named and all(isinstance(x, torch.Tensor) and x.shape == mask.shape for x in result.values()):
        prepared: dict[str, Tensor] = result
        return prepared
    returned = [f"{name}: {form(x)}" for name, x in result.items()] if isinstance(result, dict) else [form(result)]
    raise misfit(
        POLICY_LOSSES.kind,
        prepare,
        f"does not return the keyword arguments of {name_of(function)}",
        found=", ".join(returned),
        allowed=f"a dict of tensors of shape {list(mask.shape)} with the keys {', '.join(sorted(allowed))}",
        fix="return one tensor in the shape of the mask for each of these parameters",
    )


class ClipSettings(Settings):
    """How far a loss lets the ratio of the new and the old policy differ from 1 before it clips the gradient."""

    clip_low: NonNegativeFloat = Field(0.2, description="lower clip range (gmpo: of the log-ratio)")
    clip_high: NonNegativeFloat = Field(0.2, description="upper clip range (gmpo: of the log-ratio)")


class RatioClipSettings(ClipSettings):
    """The clip range of a loss that clips the ratio itself, whose lower bound 1 - clip_low is at least 0."""

    clip_low: NonNegativeFloat = Field(0.2, le=1, description="lower clip range; 1: no lower bound")


class SequenceClipSettings(ClipSettings):
    """The clip range, and an optional bound of -A s for A < 0 (s: sequence ratio), which the papers do not have."""

    dual_clip: PositiveFloat | None = Field(None, gt=1, description="bound of -A*s for A < 0; null: no bound")


class DualClipSettings(RatioClipSettings):
    """The clip range of the ratio r, and dual_clip: a bound of the loss -A r of tokens whose advantage A is below 0."""

    dual_clip: PositiveFloat | None = Field(3.0, gt=1, description="bound of -A*r for A < 0; null: no bound")


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a policy loss in float32 or wider, without NaN: zero (ratio: one) where the mask is False."""

    logp: Tensor  # differentiable
    difference: Tensor  # logp - old_logp, differentiable in logp
    log_ratio: Tensor  # `difference` clamped to +-20
    ratio: Tensor  # exponential of `log_ratio`
    advantages: Tensor  # without gradient
    mask: Tensor  # bool, tokens that count in the loss

    @classmethod
    def of(cls, logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> LossInputs:
        """Compute the inputs of a loss; all arguments have one shape, [N] or [B, T]."""
        # Multiplication by the mask would keep NaN of masked tokens.
        logp, old_logp, advantages = (
            torch.where(mask, at_least_float32(x), 0) for x in (logp, old_logp.detach(), advantages.detach())
        )
        difference = logp - old_logp
        log_ratio = difference.clamp(-LIMIT, LIMIT)
        return cls(logp, difference, log_ratio, log_ratio.exp(), advantages, mask)

    @no_grad
    def metrics(
        self, clipped: Tensor | None = None, lower: Tensor | None = None, ratio: Tensor | None = None
    ) -> Metrics:
        """Return ratio statistics over valid tokens, and the shares marked by `clipped` and `lower` (bool).

        `ratio` replaces the token ratio, for losses that use another one.
        """
        metrics, mask = Metrics(), self.mask
        if mask.numel() == 0:
            return metrics
        ratio, none = (self.ratio if ratio is None else ratio).detach(), torch.zeros_like(mask)
        numbers = [
            mask.sum(),
            self.log_ratio.sum(),
            torch.where(mask, ratio, 0).sum(),
            torch.where(mask, ratio, torch.inf).min(),
            torch.where(mask, ratio, -torch.inf).max(),
            (mask & (none if clipped is None else clipped)).sum(),
            (mask & (none if lower is None else lower)).sum(),
        ]
        # One transfer for all numbers: each transfer stalls the GPU.
        count, log_ratios, total, least, most, cut, stopped = torch.stack([x.double() for x in numbers]).tolist()
        if count:
            metrics.mean("actor/ppo_kl", 0.0 - log_ratios, count)  # not -log_ratios, which would be -0.0 for a sum of 0
            metrics.min("actor/ratio_min", least)
            metrics.mean("actor/ratio_mean", total, count)
            metrics.max("actor/ratio_max", most)
            metrics.mean("actor/pg_clipfrac", cut, count)
            metrics.mean("actor/pg_clipfrac_lower", stopped, count)
        return metrics


#: The name of `LossInputs` in users' losses for earlier versions.
Prologue = LossInputs


def capped_ratio(p: LossInputs, cap: float | None) -> tuple[Tensor, Tensor]:
    """Return the ratio r up to `cap` and its tangent at `cap` beyond it: the slope in the log-prob is min(r, cap).

    This is the truncated importance weight of a token, written as a loss. A token beyond the cap still learns, with
    weight `cap`; a constant beyond the cap would give no gradient to tokens that a negative advantage should push back.

    Returns:
        The ratio, differentiable, in the shape of the mask; and which tokens are beyond the cap (none if it is None).
    """
    if cap is None:
        return p.ratio, torch.zeros_like(p.mask)
    # `difference` is unbounded; 1e6 keeps the loss finite where the old policy gave the token a probability of 0.
    beyond = (p.difference - math.log(cap)).clamp(0, 1e6)
    return p.log_ratio.clamp(max=math.log(cap)).exp() * (1 + beyond), beyond > 0


def probabilities(p: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the tokens under the current and the old policy, without gradient."""
    new = p.logp.detach()
    return new.exp().clamp(max=1), (new - p.difference.detach()).exp().clamp(max=1)
