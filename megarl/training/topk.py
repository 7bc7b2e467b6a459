"""The likeliest tokens of one model, and the log-probs that another one gives them, for distillation; see `logprob`.

Shape legend as there; K tokens of each position. The vocabulary may be split by tensor parallelism: every rank reduces
its own columns, and all ranks get equal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.divergences import EMPTY
from megarl.data.batch import Jagged
from megarl.models.head import head_logits
from megarl.models.policy import PolicyModel
from megarl.system.comm import WorkerGroup
from megarl.training.heads import LogProbs, head_rows
from megarl.training.logprob import local_columns
from megarl.training.microbatch import MicroBatch


@dataclass(frozen=True)
class TopTokens:
    """The `k` likeliest tokens of each row, likeliest first, and all others together: ids, then log-probs.

    Attributes:
        k: tokens of each row.
        limit: ids from here on are among the others.
        base: temperature, memory and layout.
    """

    k: int
    limit: int
    base: LogProbs

    @property
    def outputs(self) -> int:
        """Ids and log-probs."""
        return 2 * self.k + 2

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return one tensor [n, 2 K + 2], float32, which holds ids exactly up to 2**24; the id of all others is -1."""
        rows, weight, start = head_rows(hidden, model, micro, self.base.columns)
        parts = [
            self._of(rows[at : at + self.base.chunk_tokens], weight, start)
            for at in range(0, max(len(rows), 1), self.base.chunk_tokens)
        ]
        return (torch.cat(parts),)

    def _of(self, rows: Tensor, weight: Tensor, start: int) -> Tensor:
        """Return [C, 2 K + 2] for a chunk."""
        logits, group = head_logits(rows, weight).float() / self.base.temperature, self.base.group
        log_z = _log_z(*_partition(logits), group)
        ids = torch.arange(start, start + logits.shape[1], device=logits.device)
        allowed = logits.masked_fill(ids >= self.limit, -torch.inf)
        best, place = allowed.topk(min(self.k, logits.shape[1]), dim=1)
        found = torch.full((len(rows), self.k, 2), -torch.inf, device=logits.device)
        found[:, :, 0] = 0
        found[:, : best.shape[1]] = torch.stack([ids[place].float(), best], 2)
        if group.size > 1 and len(rows):
            found = torch.cat(group.all_gather(found), 1)
            best, place = found[:, :, 1].topk(self.k, dim=1)
            found = torch.stack([found[:, :, 0].gather(1, place), best], 2)
        log_rest = _log_z(*_partition(_without(logits, found[:, :, 0].long(), start)), group)
        others = (log_rest - log_z).clamp(min=EMPTY)[:, None]
        return torch.cat([found[:, :, 0], torch.full_like(others, -1), found[:, :, 1] - log_z[:, None], others], 1)


@dataclass(frozen=True)
class SoftTargets:
    """The head that gives `base` for each row, and the policy's log-probs of a teacher's likeliest tokens.

    Attributes:
        base: log-probs and entropies of the sampled tokens.
        teacher: float32 [tokens of a sample, K + 1, 2] for every row of the batch, as of `TopTokens`.
    """

    base: LogProbs
    teacher: Jagged

    @property
    def outputs(self) -> int:
        """Those of `base`, and the log-probs."""
        return self.base.outputs + 1

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return (log-probs [n], entropies [n], log-probs of the teacher's tokens [n, K + 1])."""
        rows, weight, start = head_rows(hidden, model, micro, self.base.columns)
        ids = of_rows(self.teacher, micro, len(rows))[:, :-1, 0]
        of_tokens = token_logprobs(
            rows,
            weight,
            ids.to(rows.device).long(),
            temperature=self.base.temperature,
            vocab_start=start,
            chunk_tokens=self.base.chunk_tokens,
            group=self.base.group,
        )
        return (*self.base(hidden, model, micro), of_tokens)


class _Shard(NamedTuple):
    """The non-tensor arguments of a call."""

    start: int
    inverse_temperature: float
    chunk: int
    group: WorkerGroup | None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    chunk_tokens: int = 1024,
    group: WorkerGroup | None = None,
) -> Tensor:
    """Return log q of K tokens of each row and of all others together, q = softmax(hidden @ weight.T / temperature).

    One chunk of logits exists at a time, and the backward pass computes it again. The others are summed by themselves,
    because 1 - sum_k q_k would lose the digits of a small rest.

    Args:
        hidden, weight, temperature, vocab_start, chunk_tokens, group: as of `linear_logprob`.
        ids: int64 [N, K], different indices into the whole vocabulary.

    Returns:
        [N, K + 1], float32 (float64 for float64 inputs), equal on all ranks of `group`; without other tokens the last
        one is `EMPTY`.
    """
    group = None if group is None or group.size == 1 else group
    return _TokenLogprobs.apply(hidden, weight, ids, _Shard(vocab_start, 1.0 / temperature, chunk_tokens, group))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, shard: _Shard) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        picked, stats = hidden.new_zeros(ids.shape, dtype=wide), hidden.new_empty((4, len(hidden)), dtype=wide)
        for part in chunks(len(hidden), shard.chunk):
            logits = scaled_logits(hidden[part], weight, shard.inverse_temperature)
            stats[0, part], stats[1, part] = _partition(logits)
            column, here = local_columns(ids[part], shard.start, logits.shape[1])
            if logits.shape[1]:
                picked[part] = logits.gather(1, column) * here
            stats[2, part], stats[3, part] = _partition(_without(logits, ids[part], shard.start))
        if shard.group is not None and len(hidden):
            picked = shard.group.all_reduce(picked)
        log_z, log_rest = (_log_z(stats[at], stats[at + 1], shard.group) for at in (0, 2))
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, ids, log_z, log_rest)
        return torch.cat([picked, log_rest[:, None]], 1).sub_(log_z[:, None]).clamp_(min=EMPTY)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, log_z, log_rest = ctx.saved_tensors
        shard: _Shard = ctx.shard
        empty = log_rest.isinf()
        log_rest = log_rest.masked_fill(empty, 0)
        grad = torch.cat([grad[:, :-1], grad[:, -1:].masked_fill(empty[:, None], 0)], 1)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = weight.new_zeros(weight.shape, dtype=log_z.dtype)
        for part in chunks(len(hidden), shard.chunk):
            g = grad[part] * shard.inverse_temperature
            # d/dl of l_k - log Z is 1 at the token itself, and of log Z_rest - log Z the softmax among the others; each
            # less softmax(l) everywhere.
            logits = scaled_logits(hidden[part], weight, shard.inverse_temperature)
            slope = _without(logits, ids[part], shard.start).sub_(log_rest[part, None]).exp_().mul_(g[:, -1:])
            slope -= (logits - log_z[part, None]).exp_().mul_(g.sum(1, keepdim=True))
            if slope.shape[1]:
                column, here = local_columns(ids[part], shard.start, slope.shape[1])
                slope.scatter_add_(1, column, g[:, :-1] * here)
            slope = slope.to(weight.dtype)
            torch.mm(slope, weight, out=grad_hidden[part])
            grad_weight += torch.mm(slope.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def of_rows(values: Jagged, micro: MicroBatch, count: int) -> Tensor:
    """Return the values of a micro-batch's `count` rows from those of all tokens; zeros for one without samples."""
    if micro.samples:
        return values.select(list(micro.samples)).values[micro.order.cpu()]
    return values.values.new_zeros(count, *values.values.shape[1:])


def log_partition(logits: Tensor, group: WorkerGroup | None) -> Tensor:
    """Return log sum exp of each row [C] of the logits [C, v] of all ranks."""
    return _log_z(*_partition(logits), group)


def chunks(count: int, size: int) -> list[slice]:
    """Return `count` rows in slices of at most `size`."""
    return [slice(at, at + size) for at in range(0, count, size)]


def scaled_logits(hidden: Tensor, weight: Tensor, inverse_temperature: float) -> Tensor:
    """Return the logits [C, v] of this rank, wide and divided by the temperature."""
    logits = head_logits(hidden, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) * inverse_temperature


def _without(logits: Tensor, ids: Tensor, start: int) -> Tensor:
    """Return a copy of the logits [C, v] of this shard with -inf at `ids` [C, K]."""
    column, here = local_columns(ids, start, logits.shape[1])
    if not logits.shape[1]:
        return logits.clone()
    # Ids of other shards add 0 to column 0: a plain scatter would race with an id that is there.
    return logits.scatter_add(1, column, torch.where(here, -torch.inf, 0.0).to(logits.dtype))


def _partition(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of this shard's columns and the sum of exp(logit - largest), [C] each."""
    if logits.shape[1] == 0:  # no column here: a contribution of zero that stays finite
        return logits.new_full((len(logits),), torch.finfo(logits.dtype).min / 2), logits.new_zeros(len(logits))
    peak = logits.amax(1).clamp(min=torch.finfo(logits.dtype).min / 2)  # of a row of -inf
    return peak, (logits - peak[:, None]).exp_().sum(1)


def _log_z(peak: Tensor, mass: Tensor, group: WorkerGroup | None) -> Tensor:
    """log sum exp over the columns of all ranks, [N]."""
    parts = torch.stack([peak, mass])[None]
    if group is not None and group.size > 1 and len(peak):
        parts = torch.stack(group.all_gather(parts[0]))
    highest = parts[:, 0].amax(0)
    return highest + (parts[:, 1] * (parts[:, 0] - highest).exp()).sum(0).log()
