"""The loss of a policy's draft head: its cross-entropy on the tokens of the samples.

The column of token x(t) predicts x(t+2), so response token j is predicted from the column before the one from which the
policy predicts it. A token whose column would lie before its sequence (the first token after a prompt of one token) has
no loss, so no prediction crosses the border of two sequences.

Hidden states, embeddings and the vocabulary head are constants here, so the policy's gradient stays as it is without a
draft head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
class DraftLoss:
    """Computes the loss `coef` * mean(-log p) over the generated tokens of a mini-batch."""

    coef: float
    chunk_tokens: int  # number of tokens whose logits exist at the same time
    group: WorkerGroup  # tensor-parallel ranks

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

    def log_probs(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> Tensor:
        """Return the draft head's log-probs [n] of the response tokens of a micro-batch.

        Args:
            hidden: the policy's final hidden states of the stream.
        """
        following = micro.input_ids.roll(-1, 1)
        following[0, micro.packed.cu_seqlens_q[1:].long() - 1] = 0  # the last column of a sequence predicts nothing
        states = model.draft_states(following, hidden.detach(), micro.packed)
        columns = micro.rows - 1
        rows = replace(micro, rows=columns.clamp(min=0))
        states, weight, start = head_rows(states[:, 0], model, rows, None)
        return linear_logprob(
            states,
            weight.detach(),
            micro.targets,
            vocab_start=start,
            chunk_tokens=self.chunk_tokens,
            entropy=False,
            group=self.group,
        )[0]

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch, samples: Batch) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the loss, and metrics. The loss of a filler is a zero with gradients of zero.

        Args:
            hidden: the policy's final hidden states of the stream.
            samples: those of the micro-batch.
        """
        logp = self.log_probs(hidden, model, micro)
        metrics = Metrics()
        if not micro.samples:
            return logp.sum() * 0.0, metrics
        weights = samples[_WEIGHTS].values.to(logp.device)[micro.order]
        counted = weights > 0
        metrics.mean("actor/mtp_loss", -float((logp.detach() * counted).double().sum()), float(counted.sum()))
        return -self.coef * (weights * logp).sum(), metrics
