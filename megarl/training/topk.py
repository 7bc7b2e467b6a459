"""The likeliest tokens of one model, and what another one gives to them: numbers for distillation, see `logprob`.

Shape legend as there; K tokens of each position. The vocabulary may be split by tensor parallelism: every rank reduces
its own columns, and all ranks get equal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.comm import WorkerGroup
from megarl.data.batch import Jagged
from megarl.models.head import head_logits
from megarl.models.policy import PolicyModel
from megarl.training.heads import LogProbs, head_rows
from megarl.training.microbatch import MicroBatch


@dataclass(frozen=True)
class TopTokens:
    """The `k` likeliest tokens of each row, likeliest first: their ids, then their log-probs.

    Attributes:
        k: tokens of each row.
        limit: ids from here on are left out; they stay in the softmax.
        base: temperature, memory and layout.
    """

    k: int
    limit: int
    base: LogProbs

    @property
    def outputs(self) -> int:
        """Ids and log-probs."""
        return 2 * self.k

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return 2 K tensors [n], float32, which holds ids exactly up to 2**24."""
        rows, weight, start = head_rows(hidden, model, micro, self.base.columns)
        parts = [
            self._of(rows[at : at + self.base.chunk_tokens], weight, start)
            for at in range(0, max(len(rows), 1), self.base.chunk_tokens)
        ]
        return tuple(torch.cat(parts).unbind(1))

    def _of(self, rows: Tensor, weight: Tensor, start: int) -> Tensor:
        """Return [C, 2 K] for a chunk."""
        logits = head_logits(rows, weight).float() / self.base.temperature
        peak, mass = _partition(logits)
        ids = torch.arange(start, start + logits.shape[1], device=logits.device)
        logits = logits.masked_fill(ids >= self.limit, -torch.inf)
        best, place = logits.topk(min(self.k, logits.shape[1]), dim=1)
        found = torch.full((len(rows), self.k, 2), -torch.inf, device=logits.device)
        found[:, :, 0] = 0
        found[:, : best.shape[1]] = torch.stack([ids[place].float(), best], 2)
        if self.base.group.size > 1 and len(rows):
            found = torch.cat(self.base.group.all_gather(found), 1)
            best, place = found[:, :, 1].topk(self.k, dim=1)
            found = torch.stack([found[:, :, 0].gather(1, place), best], 2)
        log_z = _log_z(peak, mass, self.base.group)
        return torch.cat([found[:, :, 0], found[:, :, 1] - log_z[:, None]], 1)


@dataclass(frozen=True)
class SoftTargets:
    """The head that gives `base` for each row, and the policy's cross entropy with tokens of given probabilities.

    Attributes:
        base: log-probs and entropies of the sampled tokens.
        teacher: float32 [tokens of a sample, K, 2] for every row of the batch, ids and log-probs.
        floor: log-probs below this count as this; None: no bound.
    """

    base: LogProbs
    teacher: Jagged
    floor: float | None

    @property
    def outputs(self) -> int:
        """Those of `base`; sum of p log q; sum of q."""
        return self.base.outputs + 2

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """(log-probs, entropies, cross entropies without their sign, mass of the policy on these tokens), [n] each."""
        from megarl.algorithms.topk import teacher_terms

        rows, weight, start = head_rows(hidden, model, micro, self.base.columns)
        taught = self.teacher.values[:0]
        if micro.samples:
            taught = self.teacher.select(list(micro.samples)).values[micro.order.cpu()]
        else:
            taught = torch.zeros(len(rows), *taught.shape[1:])
        ids, probabilities, _ = teacher_terms(taught.to(rows.device), self.floor)
        both = soft_logprob(
            rows,
            weight,
            ids,
            probabilities,
            temperature=self.base.temperature,
            vocab_start=start,
            chunk_tokens=self.base.chunk_tokens,
            floor=self.floor,
            group=self.base.group,
        )
        return (*self.base(hidden, model, micro), *both)


class _Shard(NamedTuple):
    """The non-tensor arguments of a call."""

    start: int
    inverse_temperature: float
    chunk: int
    floor: float | None
    group: WorkerGroup | None


def soft_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    probabilities: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    chunk_tokens: int = 1024,
    floor: float | None = None,
    group: WorkerGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """sum_k p_k max(log q(id_k), floor), and sum_k q(id_k), q = softmax(hidden @ weight.T / temperature).

    One chunk of logits exists at a time, and the backward pass computes it again. A token at the floor has no gradient.

    Args:
        hidden, weight, temperature, vocab_start, chunk_tokens, group: as of `linear_logprob`.
        ids: int64 [N, K], indices into the whole vocabulary.
        probabilities: [N, K], p, without gradient.
        floor: log-probs below this count as this; None: no bound.

    Returns:
        [N] each, float32 (float64 for float64 inputs), equal on all ranks of `group`; the second has no gradient.
    """
    group = None if group is None or group.size == 1 else group
    shard = _Shard(vocab_start, 1.0 / temperature, chunk_tokens, floor, group)
    return _SoftLogprob.apply(hidden, weight, ids, probabilities, shard)


class _SoftLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, probabilities: Tensor, shard: _Shard
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        picked, stats = hidden.new_zeros(ids.shape, dtype=wide), hidden.new_empty((2, len(hidden)), dtype=wide)
        for part in _chunks(len(hidden), shard.chunk):
            logits = _logits(hidden[part], weight, shard)
            stats[0, part], stats[1, part] = _partition(logits)
            column, here = _local(ids[part], shard.start, logits.shape[1])
            if logits.shape[1]:
                picked[part] = logits.gather(1, column) * here
        if shard.group is not None and len(hidden):
            picked = shard.group.all_reduce(picked)
        log_z = _log_z(stats[0], stats[1], shard.group)
        logq = picked - log_z[:, None]
        shares = probabilities.to(wide)
        mass = logq.exp().sum(1)
        if shard.floor is not None:
            shares_with_gradient = shares * (logq > shard.floor)
            logq = logq.clamp(min=shard.floor)
        else:
            shares_with_gradient = shares
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, ids, shares_with_gradient, log_z)
        ctx.mark_non_differentiable(mass)
        return (shares * logq).sum(1), mass

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, shares, log_z = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad_hidden = torch.empty_like(hidden)
        grad_weight = weight.new_zeros(weight.shape, dtype=log_z.dtype)
        for part in _chunks(len(hidden), shard.chunk):
            g = grad[part, None] * shard.inverse_temperature
            p = shares[part]
            # d/dl of sum p (l - log Z) is p at the tokens themselves, less (sum p) softmax(l) everywhere.
            logits = _logits(hidden[part], weight, shard)
            slope = (logits - log_z[part, None]).exp_().mul_(-g * p.sum(1, keepdim=True))
            if slope.shape[1]:
                column, here = _local(ids[part], shard.start, slope.shape[1])
                slope.scatter_add_(1, column, g * p * here)
            slope = slope.to(weight.dtype)
            torch.mm(slope, weight, out=grad_hidden[part])
            grad_weight += torch.mm(slope.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(at, at + size) for at in range(0, count, size)]


def _logits(hidden: Tensor, weight: Tensor, shard: _Shard) -> Tensor:
    logits = head_logits(hidden, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) * shard.inverse_temperature


def _local(ids: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the column of each id in this shard (0 where it is elsewhere), and whether it is here."""
    column = ids - start
    here = (column >= 0) & (column < columns)
    return column.masked_fill(~here, 0), here


def _partition(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of this shard's columns and the sum of exp(logit - largest), [C] each."""
    if logits.shape[1] == 0:  # no column here: a contribution of zero that stays finite
        return logits.new_full((len(logits),), torch.finfo(logits.dtype).min / 2), logits.new_zeros(len(logits))
    peak = logits.amax(1)
    return peak, (logits - peak[:, None]).exp_().sum(1)


def _log_z(peak: Tensor, mass: Tensor, group: WorkerGroup | None) -> Tensor:
    """log sum exp over the columns of all ranks, [N]."""
    parts = torch.stack([peak, mass])[None]
    if group is not None and group.size > 1 and len(peak):
        parts = torch.stack(group.all_gather(parts[0]))
    highest = parts[:, 0].amax(0)
    return highest + (parts[:, 1] * (parts[:, 0] - highest).exp()).sum(0).log()
