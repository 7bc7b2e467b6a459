"""Log-probs of tokens among the tokens that the sampling filters kept (`megarl.data.kept_tokens`).

With logits l of the whole vocabulary and the kept tokens K of a position: logp = l[target] - log sum over K of exp l.
Its gradient is 1 at the target minus softmax over K at the kept tokens, and 0 at all others (DeepSeek-V3.2,
arXiv:2512.02556, section 3.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.models.head import cap_slope
from megarl.training.logprob import VocabularyShard, local_columns
from megarl.training.partition import chunks, joined_log_z, partition, scaled_logits


def kept_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, kept: Tensor, shard: VocabularyShard) -> Tensor:
    """Return the log-prob of each target among its kept tokens. One chunk of logits is in memory at a time.

    Args:
        hidden, weight, targets: as for `linear_logprob`.
        kept: int64 [N, K], kept tokens of each row, where -1 is none. A target is always kept; a row without kept
            tokens keeps the whole vocabulary.
        shard: this rank's part of the vocabulary; its entropy is not read.

    Returns:
        [N], float32 (float64 for float64 inputs), equal on all ranks of `group`.
    """
    return _KeptLogprob.apply(hidden, weight, targets, kept, shard)


class _KeptLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, kept: Tensor, shard: VocabularyShard
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        target, stats = hidden.new_zeros(len(hidden), dtype=wide), hidden.new_empty((2, len(hidden)), dtype=wide)
        for part in chunks(len(hidden), shard.chunk):
            logits = _kept_logits(hidden[part], weight, targets[part], kept[part], shard)
            stats[0, part], stats[1, part] = partition(logits)
            if logits.shape[1]:
                column, here = local_columns(targets[part], shard.start, logits.shape[1])
                target[part] = torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0)
        if shard.group is not None and len(hidden):
            target = shard.group.all_reduce(target)
        log_z = joined_log_z(stats[0], stats[1], shard.group)
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, targets, kept, log_z)
        return target - log_z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, record, log_z = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        grad_hidden = torch.empty_like(hidden)
        grad_weight = weight.new_zeros(weight.shape, dtype=log_z.dtype)
        for part in chunks(len(hidden), shard.chunk):
            g = grad[part] * shard.inverse_temperature
            logits = _kept_logits(hidden[part], weight, targets[part], record[part], shard)
            steepness = None if shard.scaled_cap is None else cap_slope(logits, shard.scaled_cap)
            slope = logits.sub_(log_z[part, None]).exp_().mul_(-g[:, None])
            if slope.shape[1]:
                column, here = local_columns(targets[part], shard.start, slope.shape[1])
                slope.scatter_add_(1, column[:, None], (g * here)[:, None])
            slope = slope if steepness is None else slope.mul_(steepness)
            slope = slope.to(weight.dtype)
            torch.mm(slope, weight, out=grad_hidden[part])
            grad_weight += torch.mm(slope.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _kept_logits(hidden: Tensor, weight: Tensor, targets: Tensor, kept: Tensor, shard: VocabularyShard) -> Tensor:
    """Return this rank's logits [C, v], divided by the temperature, with -inf at tokens that are not kept."""
    logits = scaled_logits(hidden, weight, shard.inverse_temperature, shard.cap)
    if not logits.shape[1]:
        return logits
    recorded = (kept >= 0).any(1, keepdim=True)
    ids = torch.cat([kept, targets[:, None]], 1)
    column, here = local_columns(ids, shard.start, logits.shape[1])
    # Ids of other shards, and -1, count 0 in column 0.
    count = torch.zeros_like(logits).scatter_add_(1, column, (here & (ids >= 0)).to(logits.dtype))
    return logits.masked_fill_((count == 0) & recorded, -torch.inf)
