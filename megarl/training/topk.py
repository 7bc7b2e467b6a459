"""A model's most likely tokens, and the log-probs that another model gives them, for distillation; see `logprob`.

Shape legend as in `logprob`; K tokens per position. The vocabulary may be split by tensor parallelism: every rank
reduces its own columns, and all ranks get equal results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.divergences import EMPTY
from megarl.data.batch import Jagged
from megarl.models.head import head_logits
from megarl.models.policy import PolicyModel
from megarl.models.soft_cap import cap_slope, capped
from megarl.training.heads import LogProbs, head_rows
from megarl.training.logprob import VocabularyShard, local_columns
from megarl.training.microbatch import MicroBatch
from megarl.training.partition import chunks, joined_log_z, partition, scaled_logits


@dataclass(frozen=True)
class TopTokens:
    """Computes ids and log-probs of each row's `k` most likely tokens, and the log-prob of all others together."""

    k: int  # number of most likely tokens that are returned for each row
    limit: int  # token ids from `limit` on are never in the top k; they count in the one entry for all others
    base: LogProbs  # provides temperature, chunk size and group

    @property
    def outputs(self) -> int:
        """Number of values per token: ids and log-probs of the k likeliest tokens, and of all others as one entry."""
        return 2 * self.k + 2

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return a float32 tensor [n, 2 K + 2]: K + 1 ids, exact up to 2**24, and then their K + 1 log-probs.

        They are those of the K likeliest tokens and, last, of all other tokens together, whose id is -1.
        """
        rows, weight, start = head_rows(hidden, model, micro, self.base.columns)
        parts = [
            self._of(rows[at : at + self.base.chunk_tokens], weight, start, model.logit_cap)
            for at in range(0, max(len(rows), 1), self.base.chunk_tokens)
        ]
        return (torch.cat(parts),)

    def _of(self, rows: Tensor, weight: Tensor, start: int, cap: float | None = None) -> Tensor:
        """Return the K most likely ids with their log-probs, and the log-prob of all others, for a chunk of rows:
        [C, 2 K + 2]."""
        logits = capped(head_logits(rows, weight), cap).float() / self.base.temperature
        group = self.base.group
        log_z = joined_log_z(*partition(logits), group)
        ids = torch.arange(start, start + logits.shape[1], device=logits.device)
        allowed = logits.masked_fill(ids >= self.limit, -torch.inf)
        best, place = allowed.topk(min(self.k, logits.shape[1]), dim=1)
        top = torch.full((len(rows), self.k, 2), -torch.inf, device=logits.device)
        top[:, :, 0] = 0
        top[:, : best.shape[1]] = torch.stack([ids[place].float(), best], 2)
        if group.size > 1 and len(rows):
            top = torch.cat(group.all_gather(top), 1)
            best, place = top[:, :, 1].topk(self.k, dim=1)
            top = torch.stack([top[:, :, 0].gather(1, place), best], 2)
        log_rest = joined_log_z(*partition(_without(logits, top[:, :, 0].long(), start)), group)
        others = (log_rest - log_z).clamp(min=EMPTY)[:, None]
        return torch.cat([top[:, :, 0], torch.full_like(others, -1), top[:, :, 1] - log_z[:, None], others], 1)


@dataclass(frozen=True)
class SoftTargets:
    """Computes the outputs of `base` and the policy's log-probs of a teacher's most likely tokens."""

    base: LogProbs  # log-probs and entropies of the sampled tokens
    teacher: Jagged  # float32 [tokens of a sample, K + 1, 2] for every row of the batch, from `TopTokens`

    @property
    def outputs(self) -> int:
        """Number of values per token: those of `base`, and the log-probs of the teacher's tokens."""
        return self.base.outputs + 1

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return (log-probs [n], entropies [n], log-probs [n, K + 1] of the teacher's K tokens and of all others)."""
        rows, weight, start = head_rows(hidden, model, micro, self.base.columns)
        ids = of_rows(self.teacher, micro, len(rows))[:, :-1, 0]
        group = self.base.group if self.base.group.size > 1 else None
        shard = VocabularyShard(start, 1.0 / self.base.temperature, self.base.chunk_tokens, group, cap=model.logit_cap)
        of_tokens = token_logprobs(rows, weight, ids.to(rows.device).long(), shard)
        return (*self.base(hidden, model, micro), of_tokens)


def token_logprobs(hidden: Tensor, weight: Tensor, ids: Tensor, shard: VocabularyShard) -> Tensor:
    """Return the log-probs of K tokens of each row, and of all other tokens together.

    Probabilities are softmax(hidden @ weight.T / temperature). Only one chunk of logits is in memory at a time, and the
    backward pass computes it again. The probability of the other tokens is summed directly, because 1 - sum_k q_k would
    be inexact for a small remainder.

    Args:
        hidden: [N, H], equal on all ranks of `group`; its gradient is only this rank's part (`linear_logprob`).
        weight: [V, H], this rank's rows of the output embedding.
        ids: int64 [N, K], different indices into the whole vocabulary.
        shard: this rank's part of the vocabulary; its entropy is not read.

    Returns:
        [N, K + 1], float32 (float64 for float64 inputs), equal on all ranks of `group`; without other tokens the last
            column is `EMPTY`.
    """
    return _TokenLogprobs.apply(hidden, weight, ids, shard)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, shard: VocabularyShard) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        picked, stats = hidden.new_zeros(ids.shape, dtype=wide), hidden.new_empty((4, len(hidden)), dtype=wide)
        for part in chunks(len(hidden), shard.chunk):
            logits = scaled_logits(hidden[part], weight, shard.inverse_temperature, shard.cap)
            stats[0, part], stats[1, part] = partition(logits)
            column, here = local_columns(ids[part], shard.start, logits.shape[1])
            if logits.shape[1]:
                picked[part] = logits.gather(1, column) * here
            stats[2, part], stats[3, part] = partition(_without(logits, ids[part], shard.start))
        if shard.group is not None and len(hidden):
            picked = shard.group.all_reduce(picked)
        log_z, log_rest = (joined_log_z(stats[at], stats[at + 1], shard.group) for at in (0, 2))
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, ids, log_z, log_rest)
        return torch.cat([picked, log_rest[:, None]], 1).sub_(log_z[:, None]).clamp_(min=EMPTY)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, log_z, log_rest = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        empty = log_rest.isinf()
        log_rest = log_rest.masked_fill(empty, 0)
        grad = torch.cat([grad[:, :-1], grad[:, -1:].masked_fill(empty[:, None], 0)], 1)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = weight.new_zeros(weight.shape, dtype=log_z.dtype)
        for part in chunks(len(hidden), shard.chunk):
            g = grad[part] * shard.inverse_temperature
            # The outputs are l_k - log Z for each of the k tokens, and log Z_rest - log Z for all others together.
            # Their gradients for the logits l are onehot(k) - softmax(l), and softmax over the others - softmax(l).
            logits = scaled_logits(hidden[part], weight, shard.inverse_temperature, shard.cap)
            slope = _without(logits, ids[part], shard.start).sub_(log_rest[part, None]).exp_().mul_(g[:, -1:])
            slope -= (logits - log_z[part, None]).exp_().mul_(g.sum(1, keepdim=True))
            if slope.shape[1]:
                column, here = local_columns(ids[part], shard.start, slope.shape[1])
                slope.scatter_add_(1, column, g[:, :-1] * here)
            if shard.scaled_cap is not None:
                slope *= cap_slope(logits, shard.scaled_cap)
            slope = slope.to(weight.dtype)
            torch.mm(slope, weight, out=grad_hidden[part])
            grad_weight += torch.mm(slope.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def of_rows(values: Jagged, micro: MicroBatch, count: int) -> Tensor:
    """Return the values of a micro-batch's `count` response tokens in the micro-batch's order; zeros for a filler."""
    if micro.samples:
        return values.select(list(micro.samples)).values[micro.order.cpu()]
    return values.values.new_zeros(count, *values.values.shape[1:])


def _without(logits: Tensor, ids: Tensor, start: int) -> Tensor:
    """Return a copy of this shard's logits [C, v] with -inf at `ids` [C, K]."""
    column, here = local_columns(ids, start, logits.shape[1])
    if not logits.shape[1]:
        return logits.clone()
    # Ids of other shards add 0 to column 0; a plain scatter could overwrite an id that is in column 0.
    return logits.scatter_add(1, column, torch.where(here, -torch.inf, 0.0).to(logits.dtype))
