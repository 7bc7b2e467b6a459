"""Log-probs of tokens among the tokens that the sampling filters kept (`megarl.data.kept_tokens`).

With logits l of the whole vocabulary and the kept tokens K of a position: logp = l[target] - log sum over K of exp l.
Its gradient is 1 at the target minus softmax over K at the kept tokens, and 0 at all others (DeepSeek-V3.2,
arXiv:2512.02556, section 3.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.models.head import head_logits
from megarl.models.soft_cap import cap_slope, capped
from megarl.training.logprob import (
    LogprobRows,
    VocabularyShard,
    capped_gradient,
    combine_shards,
    local_columns,
    reduce_logits,
)
from megarl.training.partition import chunks, joined_log_z, partition


def kept_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, kept: Tensor, shard: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target among its kept tokens, and the entropy of the whole distribution.

    One chunk of logits is in memory at a time; both numbers come from the same logits.

    Args:
        hidden: [N, H], equal on all ranks of `shard.group`; its gradient is only this rank's part (`linear_logprob`).
        weight: [V, H], this rank's rows of the output embedding.
        targets: int64 [N], indices into the whole vocabulary.
        kept: int64 [N, K], kept tokens of each row, where -1 is none. A target is always kept; a row without kept
            tokens keeps the whole vocabulary.
        shard: this rank's part of the vocabulary.

    Returns:
        logp [N] and entropy [N], empty without `shard.entropy`: float32 (float64 for float64 inputs), equal on all
        ranks of `shard.group`.
    """
    return _KeptLogprob.apply(hidden, weight, targets, kept, shard)


class _KeptLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, kept: Tensor, shard: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        count, wide = len(hidden), torch.promote_types(hidden.dtype, torch.float32)
        target, stats = hidden.new_zeros(count, dtype=wide), hidden.new_empty((2, count), dtype=wide)
        whole = hidden.new_empty((4, count if shard.entropy else 0), dtype=wide)
        for part in chunks(count, shard.chunk):
            raw = capped(head_logits(hidden[part], weight), shard.cap)
            if shard.entropy:
                reduce_logits(raw, targets[part], shard, whole[:, part], True)
            logits = _kept_logits(raw, targets[part], kept[part], shard)
            del raw  # frees the memory
            stats[0, part], stats[1, part] = partition(logits)
            if logits.shape[1]:
                column, here = local_columns(targets[part], shard.start, logits.shape[1])
                target[part] = torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0)
        if shard.group is not None and count:
            target = shard.group.all_reduce(target)
        log_z = joined_log_z(stats[0], stats[1], shard.group)
        _, whole_log_z, entropy = combine_shards(whole, shard)
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, targets, kept, log_z, whole_log_z, entropy)
        return target - log_z, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, record, log_z, whole_log_z, entropy = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        if grad_logp is None and grad_entropy is None:
            return None, None, None, None, None
        rows = LogprobRows(hidden, targets, whole_log_z, entropy, None, grad_entropy)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = weight.new_zeros(weight.shape, dtype=log_z.dtype)
        for part in chunks(len(hidden), shard.chunk):
            raw = capped(head_logits(hidden[part], weight), shard.cap)
            slopes = []
            if grad_entropy is not None:
                slopes.append(capped_gradient(raw, rows.part(part), shard, True, log_z.dtype))
            if grad_logp is not None:
                g = grad_logp[part] * shard.inverse_temperature
                slopes.append(_kept_gradient(raw, targets[part], record[part], log_z[part], g, shard))
            slope = slopes[0].add_(slopes[1]) if slopes[1:] else slopes[0]
            slope = (slope if shard.cap is None else slope.mul_(cap_slope(raw, shard.cap))).to(weight.dtype)
            torch.mm(slope, weight, out=grad_hidden[part])
            grad_weight += torch.mm(slope.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _kept_gradient(
    raw: Tensor, targets: Tensor, kept: Tensor, log_z: Tensor, grad: Tensor, shard: VocabularyShard
) -> Tensor:
    """Return the gradient [C, v] of the logits `raw`; `grad` [C]: gradient of the log-prob, divided by the
    temperature."""
    slope = _kept_logits(raw, targets, kept, shard).sub_(log_z[:, None]).exp_().mul_(-grad[:, None])
    if slope.shape[1]:
        column, here = local_columns(targets, shard.start, slope.shape[1])
        slope.scatter_add_(1, column[:, None], (grad * here)[:, None])
    return slope


def _kept_logits(raw: Tensor, targets: Tensor, kept: Tensor, shard: VocabularyShard) -> Tensor:
    """Return this rank's logits `raw` [C, v] in at least float32, divided by the temperature, with -inf at tokens that
    the sampling filters removed.

    Args:
        kept: ids that the filters kept, [C, most], padded with -1; only -1: no record, all tokens count.
    """
    logits = raw.to(torch.promote_types(raw.dtype, torch.float32)) * shard.inverse_temperature
    if not logits.shape[1]:
        return logits
    recorded = (kept >= 0).any(1, keepdim=True)
    ids = torch.cat([kept, targets[:, None]], 1)
    column, here = local_columns(ids, shard.start, logits.shape[1])
    # Ids of other shards, and -1, count 0 in column 0.
    count = torch.zeros_like(logits).scatter_add_(1, column, (here & (ids >= 0)).to(logits.dtype))
    return logits.masked_fill_((count == 0) & recorded, -torch.inf)
