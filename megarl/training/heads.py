"""Heads of the last pipeline stage: they turn hidden states into numbers for every response token of a micro-batch.

A head gets the hidden states of this rank's tokens and returns float32 tensors [n], one number per row of the
micro-batch, equal on all tensor-parallel ranks. Each of these ranks then computes the same loss, and each head makes
sure that the gradient is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megarl.models.head import head_logits
from megarl.models.noise import exponential_noise
from megarl.models.policy import PolicyModel
from megarl.models.soft_cap import capped
from megarl.system.comm import WorkerGroup
from megarl.system.compat import megatron as compat
from megarl.training.kept_logprob import kept_logprob
from megarl.training.logprob import VocabularyShard, linear_logprob
from megarl.training.microbatch import MicroBatch

compat.install()

from megatron.core.tensor_parallel.mappings import (  # noqa: E402  (after install)
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


class Head(Protocol):
    """A function from final hidden states to values per token; `head(hidden [t, h], model, micro)` computes them."""

    @property
    def outputs(self) -> int:
        """Number of values that the head returns per token, in all its tensors together."""

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Compute the values. Under sequence parallelism `hidden` has this rank's t / tp tokens."""


@dataclass(frozen=True)
class LogProbs:
    """Computes the log-prob of each row's target token, and the entropy if asked for.

    Tensor-parallel ranks each have a part of the vocabulary, and all of them return the values of every row. Where the
    micro-batch has kept tokens, log-probs are among them; the entropy is always of the whole distribution.
    """

    temperature: float  # divides the logits
    chunk_tokens: int  # number of rows whose logits exist at the same time
    group: WorkerGroup  # tensor-parallel ranks
    entropy: bool = True  # whether to return the entropy too
    # first and one past the last token of the softmax, which includes all targets; None: all tokens
    columns: tuple[int, int] | None = None

    @property
    def outputs(self) -> int:
        """Number of values per token: 2 with the entropy, otherwise 1."""
        return 2 if self.entropy else 1

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return (log-probs [n],) or (log-probs [n], entropies [n])."""
        rows, weight, start = head_rows(hidden, model, micro, self.columns)
        place: dict[str, Any] = {
            "temperature": self.temperature,
            "vocab_start": start,
            "chunk_tokens": self.chunk_tokens,
            "group": self.group,
            "cap": model.logit_cap,
        }
        if micro.kept_tokens is None:
            both = linear_logprob(rows, weight, micro.targets, entropy=self.entropy, **place)
            return both if self.entropy else both[:1]
        group = self.group if self.group.size > 1 else None
        shard = VocabularyShard(
            start, 1.0 / self.temperature, self.chunk_tokens, group, self.entropy, cap=model.logit_cap
        )
        both = kept_logprob(rows, weight, micro.targets, micro.kept_tokens, shard)
        return both if self.entropy else both[:1]


def head_rows(
    hidden: Tensor, model: PolicyModel, micro: MicroBatch, columns: tuple[int, int] | None
) -> tuple[Tensor, Tensor, int]:
    """Return the hidden states [n, h] of the micro-batch's rows, this rank's rows of the output embedding, and the
    token id of the first of these.

    `columns`: first and one past the last token id of the softmax; None: the whole vocabulary.
    """
    if model.config.sequence_parallel:
        rows = gather_from_sequence_parallel_region(hidden)[micro.rows]
    else:
        rows = copy_to_tensor_model_parallel_region(hidden[micro.rows])
    start, stop = model.vocab_range
    weight = model.lm_head_weight
    if columns is not None:  # the columns may lie outside of this rank's shard of the vocabulary
        first, last = (min(max(column, start), stop) for column in columns)
        start, weight = first, weight[first - start : last - start]
    return rows, weight, start


@dataclass(frozen=True)
class Values:
    """Predicts the return at each row with the critic's value head, in float32 for any dtype of the model."""

    outputs: ClassVar[int] = 1

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return (values [n],)."""
        if not model.config.sequence_parallel:
            # All tensor-parallel ranks have the same tokens and the whole head, so each computes the same gradient of
            # the head: no sum over these ranks is needed.
            return (model.values(hidden[micro.rows])[:, 0],)
        # Each rank has some of the tokens, so its weight gradient is a part (the weight is marked for the sum). The
        # loss after the gather is the same on all ranks, so each takes back the gradient of its own tokens only.
        values = model.values(hidden)
        return (gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)[micro.rows, 0],)


@dataclass(frozen=True)
class SampledTokens:
    """Samples a token for each row from a range of the vocabulary, and returns the token and its log-prob."""

    temperature: float  # divides the logits; 0: the most likely token, with its log-prob at temperature 1
    group: WorkerGroup  # tensor-parallel ranks
    columns: tuple[int, int]  # first and one past the last token that may be sampled
    seeds: Tensor  # int64 [B], seed of each row of the batch
    slots: int  # number of tokens to sample per row of the batch, equal for all rows
    outputs: ClassVar[int] = 2

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return the chosen action tokens [n] and their log-probs [n], as float32: exact for ids up to 2**24."""
        rows = gather_from_sequence_parallel_region(hidden) if model.config.sequence_parallel else hidden
        start, stop = model.vocab_range
        first, last = (min(max(column, start), stop) for column in self.columns)
        local = head_logits(rows[micro.rows], model.lm_head_weight[first - start : last - start])
        logits = over_columns(capped(local, model.logit_cap), (first, last), self.columns, self.group)
        seeds = None
        if self.temperature and micro.samples:
            call = torch.tensor(micro.samples, device=logits.device)[micro.order // self.slots]
            seeds = self.seeds.to(logits.device)[call]
        token, logp = draw(logits / (self.temperature or 1.0), self.columns[0], seeds, micro.order % self.slots)
        return token.float(), logp


def over_columns(local: Tensor, shard: tuple[int, int], columns: tuple[int, int], group: WorkerGroup) -> Tensor:
    """Gather the float32 logits [n, last - first] of the token ids first to last - 1, on every tensor-parallel rank.

    Args:
        local: logits [n, v] of some of the token ids in this rank's shard of the vocabulary.
        shard: first and one past the last token id of `local`.
        columns: (first, last), the range of token ids to return.
    """
    start, stop = shard
    first, last = (min(max(column, start), stop) for column in columns)
    logits = torch.zeros(len(local), columns[1] - columns[0], device=local.device)
    logits[:, first - columns[0] : last - columns[0]] = local[:, first - start : last - start]
    if group.size > 1:  # each rank has the logits of its part of the vocabulary, and zeros elsewhere
        group.all_reduce(logits)
    return logits


def draw(logits: Tensor, first: int, seeds: Tensor | None, index: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token from each row of logits [n, columns]; return token ids int64 [n] and their log-probs float32 [n].

    Args:
        first: token id of the first column.
        seeds: int64 [n], one seed per row; None: take the most likely tokens.
        index: int64 [n], number of the token within its sample. A row's noise depends only on its seed and its index.
    """
    score = logits
    if seeds is not None:
        ids = torch.arange(first, first + logits.shape[1], device=logits.device)
        score = logits - exponential_noise(seeds, index, ids)
    token = score.argmax(-1)
    return token + first, logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
