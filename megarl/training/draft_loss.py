"""The loss of a policy's draft head: its cross-entropy on the tokens of the samples.

The column of token x(t) predicts x(t+2), so response token j is predicted from the column before the one from which the
policy predicts it. A token whose column would lie before its sequence (the first token after a prompt of one token) has
no loss, so no prediction crosses the border of two sequences.

Hidden states, embeddings and the vocabulary head are constants here, so the policy's gradient stays as it is without a
draft head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megarl.data.batch import Batch
from megarl.models.policy import PolicyModel
from megarl.system.comm import WorkerGroup
from megarl.system.metrics import Metrics
from megarl.training.heads import head_rows
from megarl.training.logprob import linear_logprob
from megarl.training.microbatch import MicroBatch

_WEIGHTS = "draft_weights"


@dataclass(frozen=True)
class DraftLogProbs:
    """Computes the draft head's log-prob of each row's target token; its micro-batch is `MicroBatch.draft`."""

    outputs: ClassVar[int] = 1
    chunk_tokens: int  # number of tokens whose logits exist at the same time
    group: WorkerGroup  # tensor-parallel ranks

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return the draft head's log-probs of the target tokens, [n], as the only output."""
        states = model.draft_states(micro.input_ids, hidden[:, None].detach(), micro.packed)
        states, weight, start = head_rows(states[:, 0], model, micro, None)
        place: dict[str, Any] = {"vocab_start": start, "chunk_tokens": self.chunk_tokens, "group": self.group}
        return linear_logprob(states, weight.detach(), micro.targets, entropy=False, **place)[:1]


@dataclass(frozen=True)
class DraftLoss:
    """Computes the loss `coef` * mean(-log p) over the generated tokens of a mini-batch."""

    coef: float

    def weigh(self, batch: Batch, replicas: WorkerGroup) -> None:
        """Add each response token's share of the mean to this rank's part of a mini-batch. Collective over `replicas`.

        Tokens of the environment (`response_mask`) have no share.
        """
        responses = batch["response_ids"].to("cpu")
        counted = batch["response_mask"].to("cpu").values.double() if "response_mask" in batch else None
        if counted is None:
            counted = torch.ones(len(responses.values), dtype=torch.float64)
        counted[responses.offsets[:-1][batch["prompt_ids"].lengths.cpu() == 1]] = 0
        total = replicas.all_reduce(counted.sum()[None])
        batch.set(_WEIGHTS, responses.like((counted / total.clamp(min=1)).float()))

    def __call__(self, logp: Tensor, micro: MicroBatch, samples: Batch) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the loss, and metrics. A micro-batch without samples has a loss of zero.

        Args:
            logp: [N], the draft head's log-probs of all response tokens of the micro-batch.
            samples: the samples of the micro-batch.
        """
        metrics = Metrics()
        if not micro.samples:
            return logp.sum() * 0.0, metrics
        weights = samples[_WEIGHTS].values.to(logp.device)
        counted = weights > 0
        metrics.mean("actor/mtp_loss", -float((logp.detach() * counted).double().sum()), float(counted.sum()))
        return -self.coef * (weights * logp).sum(), metrics
