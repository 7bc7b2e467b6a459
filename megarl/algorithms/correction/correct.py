"""Rollout correction in one pass over the tokens.

Source: "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (Liu et al. 2025)
for sequence and geometric rejection; decoupled PPO (arXiv 2110.00641) for the three policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.correction.metrics import Moments, add_gap, add_weights
from megarl.algorithms.correction.ratios import LIMIT, Ratios, Threshold, importance_weights, is_truncated
from megarl.algorithms.correction.rejection import Rule, reject
from megarl.algorithms.rows import Rows
from megarl.algorithms.stats import AllSum, one_rank
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from megarl.config.correction import ResolvedCorrection


class Correction(NamedTuple):
    """The corrected mask and weights of a batch."""

    weights: Tensor  # float in the shape of the mask: factor of each token's policy loss, zero where `mask` is False
    mask: Tensor  # bool, same shape: the given mask without rejected tokens, for losses and their normalisers
    keep: Tensor  # bool [B]: False for samples that lost all their tokens
    moments: Metrics  # raw sums from which `finish` computes the metrics
    normaliser: Tensor  # float64 [2], sum and number of this batch's importance weights, for their mean


@torch.no_grad()
def correct(
    logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    is_level: str = "none",
    is_threshold: Threshold = 2.0,
    is_batch_normalize: bool = False,
    is_normalize_over: str = "trained",
    rules: Sequence[Rule] = (),
    veto: float = 0.0,
    copies: Tensor | None = None,
    outside: Tensor | None = None,
    all_sum: AllSum = one_rank,
) -> Correction:
    """Compute weights, rejection and metrics for rho = exp(clamp(logp - rollout_logp, -20, 20)), without gradient.

    Args:
        logp: float [N] or [B, T], log-probs of the trainer's policy.
        rollout_logp: same shape, log-probs of the policy that sampled the tokens.
        mask: bool, same shape.
        offsets: int64 [B + 1] for the packed form.
        is_level: none, token or sequence; none gives weights of 1.
        is_threshold: C of min(ratio, C); or [low, high], outside of which weights are 0.
        is_batch_normalize: divide by the mean weight over tokens (token) or sequences (sequence) of all ranks.
        is_normalize_over: which weights count in this mean: `trained` (without rejected tokens) or `all`, as in verl.
        rules: a token is trained on if all of them accept it.
        veto: reject sequences with a ratio (not clamped) below this value; 0: no veto.
        copies: int64 [B], how often each sequence counts in the mean weight; None: once.
        outside: bool, same shape, experts' tokens, without a rollout log-prob: neither measured nor rejected, weight 1.
        all_sum: adds over ranks; every rank must call it, once, if weights are normalised.
    """
    rows = Rows.of(mask, offsets)
    flat = [x.detach().reshape(-1) for x in (logp, rollout_logp)]
    flat_mask = (mask if outside is None else mask & ~outside).reshape(-1)
    weights = torch.ones_like(flat[0], dtype=torch.promote_types(logp.dtype, torch.float32))
    accepted, keep = torch.empty_like(flat_mask), flat_mask.new_ones(len(rows))
    moments, normaliser = Moments(), torch.zeros(2, dtype=torch.float64, device=mask.device)
    for first, last, tokens in rows.blocks():
        block = Rows(rows.offsets[first : last + 1] - tokens.start, rows.width)
        new, old = (x[tokens].to(weights.dtype) for x in flat)
        ratios = Ratios(block, flat_mask[tokens], (new - old).masked_fill_(~flat_mask[tokens], 0))
        add_gap(moments, ratios, new, old)
        accepted[tokens], keep[first:last] = _rejection(moments, ratios, rules, veto)
        if is_level != "none":
            items, where, truncated = _weighing(ratios, accepted[tokens], is_level, is_threshold)
            add_weights(moments, items, where, truncated)
            chosen = where if is_normalize_over == "trained" else ratios.mask if is_level == "token" else ratios.live
            times = None if copies is None else copies[first:last].to(items)
            normaliser += _total(items, chosen, times if times is None or is_level != "token" else block.expand(times))
            weights[tokens] = items if is_level == "token" else block.expand(items)
    bag = moments.bag()
    if is_level != "none" and is_batch_normalize:
        factor = mean_weight(*all_sum(normaliser.cpu()).tolist())
        bag.mean("rollout_corr/is_batch_norm", factor, 1)
        weights.div_(factor)
    weights.masked_fill_(~accepted, 0)  # multiplication by the mask would keep the NaN of rejected tokens
    correction = Correction(weights.view(mask.shape), accepted.view(mask.shape), keep, bag, normaliser)
    return correction if outside is None else _accept(correction, mask & outside)


def _accept(correction: Correction, tokens: Tensor) -> Correction:
    """Return the correction with these tokens, bool of the mask's shape, accepted with weight 1."""
    weights = correction.weights.masked_fill(tokens, 1)
    return correction._replace(weights=weights, mask=correction.mask | tokens)


def _total(items: Tensor, chosen: Tensor, copies: Tensor | None) -> Tensor:
    """Return the sum and the number of the chosen weights, float64 [2]; each weight counts `copies` times."""
    # A NaN ratio is left out; if it is not rejected, the loss raises an error.
    counted = chosen & ~items.isnan()
    times = counted.to(items.dtype)
    if copies is not None:
        times = times * copies
    return torch.stack([(items.masked_fill(~counted, 0) * times).sum().double(), times.sum().double()])


def _rejection(moments: Moments, ratios: Ratios, rules: Sequence[Rule], veto: float) -> tuple[Tensor, Tensor]:
    """Return the accepted tokens, bool [N], and the rows that keep a token, bool [B]; record how many were rejected."""
    if not rules and veto <= 0:
        return ratios.mask, ratios.live.new_ones(len(ratios.rows))
    trained, counts = reject(ratios, rules, veto)
    lost = ratios.live & (ratios.rows.counts(trained) == 0)
    moments.sum("rejected", ratios.count.sum() - trained.sum())
    moments.sum("rejected_rows", lost.sum())
    for name, count in counts.items():
        moments.sum(f"rejected/{name}", count)
    return trained, ~lost


def _weighing(ratios: Ratios, trained: Tensor, level: str, threshold: Threshold) -> tuple[Tensor, Tensor, Tensor]:
    """Return the importance weights of tokens or rows (by `level`), which of them are trained on, and which are
    truncated.
    """
    weights = importance_weights(ratios, level, threshold)
    if level == "token":
        return weights, trained, is_truncated(ratios.rho, threshold)
    ratio = ratios.total.clamp(-LIMIT, LIMIT).exp()
    return weights, ratios.rows.counts(trained) > 0, is_truncated(ratio, threshold)


def mean_weight(total: float, count: float) -> float:
    """Return the mean importance weight, by which the weights are divided; 1 if all weights are 0.

    Args:
        total, count: sum and number of the weights.
    """
    return total / count if total > 0 else 1.0


def rules_of(correction: ResolvedCorrection) -> list[Rule]:
    """Return the rejection rules that a recipe's `rollout_correction` lists."""
    return [Rule(**rule) for rule in correction.rules]
