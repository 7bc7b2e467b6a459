"""The heads of the last pipeline stage: they turn hidden states into numbers for every response token of a micro-batch.

A head gets the hidden states of this rank's tokens and returns float32 tensors [n], one number per row of the
micro-batch, equal on all tensor-parallel ranks. Every tensor-parallel rank then computes the same loss, and each head
sees to it that the gradient comes back once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megarl.models.head import head_logits
from megarl.models.noise import race
from megarl.models.policy import PolicyModel
from megarl.system.comm import WorkerGroup
from megarl.system.compat import megatron as compat
from megarl.training.logprob import linear_logprob
from megarl.training.microbatch import MicroBatch

compat.install()

from megatron.core.tensor_parallel.mappings import (  # noqa: E402  (after install)
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


class Head(Protocol):
    """The protocol of a head: `head(hidden [t, h], model, micro)` -> `outputs` tensors, float32 [n]."""

    @property
    def outputs(self) -> int:
        """The count of numbers per token."""

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Compute the numbers. Under sequence parallelism `hidden` holds this rank's t / tp tokens."""


@dataclass(frozen=True)
class LogProbs:
    """The head for the log-prob of each row's target and, if asked, the entropy: fused, over a vocabulary split by
    tensor parallelism.

    Attributes:
        temperature: divides the logits.
        chunk_tokens: rows whose logits exist at the same time.
        group: tensor-parallel ranks.
        entropy: also return the entropy.
        columns: first and one past the last token that the softmax is over, all targets among them; None: all tokens.
    """

    temperature: float
    chunk_tokens: int
    group: WorkerGroup
    entropy: bool = True
    columns: tuple[int, int] | None = None

    @property
    def outputs(self) -> int:
        """Log-prob, and the entropy."""
        return 2 if self.entropy else 1

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return (log-probs [n],) or (log-probs [n], entropies [n])."""
        rows, weight, start = head_rows(hidden, model, micro, self.columns)
        both = linear_logprob(
            rows,
            weight,
            micro.targets,
            temperature=self.temperature,
            vocab_start=start,
            chunk_tokens=self.chunk_tokens,
            entropy=self.entropy,
            group=self.group,
        )
        return both if self.entropy else both[:1]


def head_rows(
    hidden: Tensor, model: PolicyModel, micro: MicroBatch, columns: tuple[int, int] | None
) -> tuple[Tensor, Tensor, int]:
    """Return the hidden states [n, h] of the rows, this rank's rows of the output embedding, and the first row's token.

    `columns`: first and one past the last token that the softmax is over; None: all.
    """
    if model.config.sequence_parallel:
        rows = gather_from_sequence_parallel_region(hidden)[micro.rows]
    else:
        rows = copy_to_tensor_model_parallel_region(hidden[micro.rows])
    start, stop = model.vocab_range
    weight = model.lm_head_weight
    if columns is not None:  # they may lie on some of the ranks only
        first, last = (min(max(column, start), stop) for column in columns)
        start, weight = first, weight[first - start : last - start]
    return rows, weight, start


@dataclass(frozen=True)
class Values:
    """The head that predicts the return at each row, with the value head; computed in float32 whatever the model's
    dtype."""

    outputs: ClassVar[int] = 1

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return (values [n],)."""
        if not model.config.sequence_parallel:
            # The head is whole on every rank, so is its gradient: nothing to add up.
            return (model.values(hidden[micro.rows])[:, 0],)
        # Each rank has some of the tokens, so its gradient of the weight is a part (the weight is marked for the sum);
        # the loss after the gather is the same on all ranks, so each takes back only the gradient of its own tokens.
        mine = model.values(hidden)
        return (gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=False)[micro.rows, 0],)


@dataclass(frozen=True)
class SampledTokens:
    """A token for each row, sampled over some columns of the vocabulary, and its log-prob.

    Attributes:
        temperature: divides the logits; 0: the likeliest token, with its log-prob at temperature 1.
        group: tensor-parallel ranks.
        columns: first and one past the last token that may be sampled.
        seeds: int64 [B], of each row of the batch.
        slots: tokens of a row of the batch.
    """

    temperature: float
    group: WorkerGroup
    columns: tuple[int, int]
    seeds: Tensor
    slots: int
    outputs: ClassVar[int] = 2

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return (tokens [n], log-probs [n]) as float32, which holds numbers of tokens exactly up to 2**24."""
        rows = gather_from_sequence_parallel_region(hidden) if model.config.sequence_parallel else hidden
        start, stop = model.vocab_range
        first, last = (min(max(column, start), stop) for column in self.columns)
        own = head_logits(rows[micro.rows], model.lm_head_weight[first - start : last - start]).float()
        logits = own.new_zeros(len(own), self.columns[1] - self.columns[0])
        logits[:, first - self.columns[0] : last - self.columns[0]] = own
        if self.group.size > 1:  # they are few, and each rank has some of them
            self.group.all_reduce(logits)
        logits = logits / (self.temperature or 1.0)
        score = logits
        if self.temperature and micro.samples:
            call = torch.tensor(micro.samples, device=logits.device)[micro.order // self.slots]
            ids = torch.arange(*self.columns, device=logits.device)
            score = logits - race(self.seeds.to(logits.device)[call], micro.order % self.slots, ids)
        token = score.argmax(-1)
        logp = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
        return (token + self.columns[0]).float(), logp
