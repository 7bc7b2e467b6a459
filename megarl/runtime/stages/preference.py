"""The update on preference pairs; the maths is in `megarl.algorithms.preference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Kind, Role, stage
from megarl.data.fields import IMAGES
from megarl.data.groups import ORDINAL
from megarl.runtime.stages.needs import call_fields
from megarl.runtime.stages.resampling import COPIES
from megarl.runtime.stages.update import mini_batches

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megarl.algorithms.preference import Responses
    from megarl.data.batch import Batch
    from megarl.metrics import Metrics
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import ActorRole, ReferenceRole

#: The fields of the pairs that enter a graph: two samples of one `uid`, the chosen one first.
PAIR_FIELDS = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "uid",
    "sample_id",
    "prompt_text",
    "response_text",
    "answer",
    "data_source",
    "row",
    *IMAGES,
)
_PAIR = 2  # samples that are never in different micro-batches


@stage(
    reads=["prompt_ids", "response_ids", "response_mask", "ref_logp", "uid", "sample_id"],
    optional=[ORDINAL, COPIES],  # of the mini-batches
    needs=call_fields,
    writes=[],
    kind=Kind.MODEL_TRAIN,
    role=Role.ACTOR,
)
def dpo_train(c: StepContext, samples: Batch, *, actor: ActorRole) -> Batch:
    """`ppo_epochs` passes over the pairs, one optimizer step per mini-batch."""
    for epoch in range(c.config.actor.ppo_epochs):
        for mini in mini_batches(c, samples, "actor", epoch):
            metrics = pair_step(c, mini, actor)
            c.count_pass(mini, train=True)
            if c.layout.rank == 0:  # already merged over all ranks
                c.metrics.merge(metrics)
    columns = sum(map(sum, c.sequences.sample_columns(samples)))
    c.metrics.sum("perf/total_tokens", float(columns))
    return samples


def pair_step(c: StepContext, mini: Batch, actor: ActorRole) -> Metrics:
    """One optimizer step on this rank's pairs of a mini-batch."""
    from megarl.algorithms.preference import local_pair_counts, preference_loss

    settings, mask = c.config.preference, mini["response_mask"]
    assert settings is not None, "the pipeline asks for it"
    counts = c.all_sum(local_pair_counts(mask.values, mask.offsets))

    def loss(logp: Tensor, entropy: Tensor, micro: Batch) -> tuple[Tensor, Metrics]:
        return preference_loss(logp, _responses(micro, logp.device), settings, counts)

    return actor.train_step(mini, loss, unit=_PAIR)


def measure_pairs(c: StepContext, pairs: Batch, actor: ActorRole, reference: ReferenceRole) -> Metrics:
    """Return the loss and the rewards of held-out pairs, of which this rank may have none. Collective."""
    import torch

    from megarl.algorithms.preference import preference_loss
    from megarl.metrics import Metrics

    settings = c.config.preference
    assert settings is not None, "there are pairs"
    logp = actor.score(pairs)
    pairs.set("ref_logp", reference.score(pairs))
    if not len(pairs):
        return Metrics()
    _, metrics = preference_loss(logp.values, _responses(pairs, "cpu"), settings, torch.ones(2))
    return metrics


def _responses(samples: Batch, device: torch.device | str) -> Responses:
    from megarl.algorithms.preference import Responses

    mask = samples["response_mask"].to(device)
    return Responses(mask.values, mask.offsets, samples["ref_logp"].values.to(device))
