"""The divergence of policy and teacher over the whole vocabulary, from the hidden states of both; see `logprob`.

A teacher's hidden state is far smaller than its distribution, so it is what samples carry, and the logits of both
models exist for one chunk of tokens at a time. Shape legend as in `logprob`; the vocabulary may be split by tensor
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.data.batch import Jagged
from megarl.models.policy import PolicyModel
from megarl.models.soft_cap import cap_slope
from megarl.system.comm import WorkerGroup
from megarl.training.heads import LogProbs, head_rows
from megarl.training.microbatch import MicroBatch
from megarl.training.partition import chunks, log_partition, scaled_logits
from megarl.training.topk import of_rows

#: Computes a divergence's terms [C, v] from the log-probs of the teacher and the policy, [C, v] each: C tokens, and v
#: ids of the vocabulary on this rank.
Terms = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HiddenStates:
    """Returns the final hidden states [n, outputs], from which the output embedding would compute logits."""

    outputs: int

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return the final hidden states [n, outputs] of response tokens in float32, as the only output."""
        return (head_rows(hidden, model, micro, None)[0].float(),)


class TeacherHead(NamedTuple):
    """This rank's rows [v, width] of a teacher's output embedding, and the terms of a divergence."""

    weight: Tensor
    terms: Terms
    cap: float | None = None  # the cap of the teacher's logits


@dataclass(frozen=True)
class WholeVocabulary:
    """Computes the outputs of `base` and the divergence from a teacher over the policy's vocabulary, for each row."""

    base: LogProbs  # log-probs and entropies of the sampled tokens
    teacher: Jagged  # [tokens of a sample, teacher's width] for every row of the batch, the teacher's hidden states
    head: TeacherHead  # the teacher's head

    @property
    def outputs(self) -> int:
        """Number of values per token: log-prob, entropy (if `base` computes it) and divergence."""
        return self.base.outputs + 1

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return (log-probs [n], entropies [n], divergences [n])."""
        rows, weight, _ = head_rows(hidden, model, micro, self.base.columns)
        states = of_rows(self.teacher, micro, len(rows)).to(rows.device)
        divergences = vocabulary_divergence(
            rows,
            weight,
            states.to(self.head.weight.dtype),
            self.head,
            cap=model.logit_cap,
            temperature=self.base.temperature,
            chunk_tokens=self.base.chunk_tokens,
            group=self.base.group,
        )
        return (*self.base(hidden, model, micro), divergences)


class _Shard(NamedTuple):
    """The arguments of `vocabulary_divergence` that are not tensors."""

    inverse_temperature: float
    chunk: int
    group: WorkerGroup
    terms: Terms
    cap: float | None
    teacher_cap: float | None


def vocabulary_divergence(
    hidden: Tensor,
    weight: Tensor,
    states: Tensor,
    teacher: TeacherHead,
    *,
    temperature: float,
    chunk_tokens: int,
    group: WorkerGroup,
    cap: float | None = None,
) -> Tensor:
    """Sum f(log p, log q) over the vocabulary, with p of a teacher and q of the policy, both at `temperature`.

    Both are softmaxes over the same tokens. The backward pass computes the logits of both again, chunk by chunk.

    Args:
        hidden, weight: [N, H] and [v, H], of the policy; differentiable.
        states: [N, H'], of the teacher.
        teacher: its head, whose weight is [v, H'], and the function f, computed under autograd for the gradient.
        chunk_tokens: number of rows whose logits are in memory at the same time.
        group: ranks that each hold a part of the vocabulary.
        cap: the cap of the policy's logits.

    Returns:
        [N], float32 (float64 for float64 inputs), equal on all ranks of `group`.
    """
    shard = _Shard(1.0 / temperature, chunk_tokens, group, teacher.terms, cap, teacher.cap)
    return _Divergence.apply(hidden, weight, states, teacher.weight, shard)


class _Divergence(torch.autograd.Function):
    """For each row the sum of f(log p, log q) over the vocabulary, with p of the teacher and q of the policy, where f
    defines the divergence. Only the policy gets a gradient.

    With s = df / d log q, the gradient of the policy's logit of token v is s_v - q_v sum_u s_u.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, states: Tensor, teacher_weight: Tensor, shard: _Shard
    ) -> Tensor:
        sums = hidden.new_zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part in chunks(len(hidden), shard.chunk):
            teacher = _log_softmax(_logits(states[part], teacher_weight, shard, shard.teacher_cap), shard)
            policy = _log_softmax(_logits(hidden[part], weight, shard, shard.cap), shard)
            sums[part] = shard.terms(teacher, policy).sum(1)
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, states, teacher_weight)
        return shard.group.all_reduce(sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, states, teacher_weight = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad_hidden = torch.empty_like(hidden)
        grad_weight = weight.new_zeros(weight.shape, dtype=grad.dtype)
        for part in chunks(len(hidden), shard.chunk):
            teacher = _log_softmax(_logits(states[part], teacher_weight, shard, shard.teacher_cap), shard)
            logits = _logits(hidden[part], weight, shard, shard.cap)
            bend = None if shard.cap is None else cap_slope(logits, shard.cap * shard.inverse_temperature)
            policy = _log_softmax(logits, shard).requires_grad_()
            del logits  # the terms below take much memory
            with torch.enable_grad():
                total = shard.terms(teacher, policy).sum()
            (slope,) = torch.autograd.grad(total, policy)
            everywhere = shard.group.all_reduce(slope.sum(1))
            slope = slope - policy.detach().exp() * everywhere[:, None]
            if bend is not None:
                slope = slope * bend
            slope = (slope * (grad[part, None] * shard.inverse_temperature)).to(weight.dtype)
            torch.mm(slope, weight, out=grad_hidden[part])
            grad_weight += torch.mm(slope.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _logits(rows: Tensor, weight: Tensor, shard: _Shard, cap: float | None) -> Tensor:
    return scaled_logits(rows, weight, shard.inverse_temperature, cap)


def _log_softmax(logits: Tensor, shard: _Shard) -> Tensor:
    """Return the log-probs [C, v] of this rank's tokens under the softmax over all ranks' tokens."""
    return logits - log_partition(logits, shard.group)[:, None]
