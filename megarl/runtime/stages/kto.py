"""The update on examples that are labelled as desirable or not; the maths is in `megarl.algorithms.kto`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Kind, Role, stage
from megarl.runtime.stages.needs import call_fields
from megarl.runtime.stages.preference import PAIR_FIELDS, count_tokens, dtype_of, responses_of, settings_of, trains
from megarl.runtime.stages.update import train_actor
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from megarl.algorithms.kto import Counts
    from megarl.data.batch import Batch, Jagged
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import ActorRole, ReferenceRole

_MISMATCHED = ("mismatched_ids", "mismatched_mask")
#: The fields of the examples that enter a graph.
EXAMPLE_FIELDS = (*(name for name in PAIR_FIELDS if name != "margin"), "label", *_MISMATCHED)


@stage(
    reads=["prompt_ids", "mismatched_ids"],
    needs=call_fields,
    writes=["mismatched_ref_logp"],
    kind=Kind.MODEL_INFERENCE,
    role=Role.REFERENCE,
)
def mismatched_ref_logp(c: StepContext, samples: Batch, *, reference: ReferenceRole) -> Batch:
    """Score each prompt's mismatched response with the frozen reference."""
    samples.set("mismatched_ref_logp", reference.log_probs(mismatched(samples)))
    return samples


@trains(
    reads=[
        *("prompt_ids", "response_ids", "response_mask", "ref_logp", "uid", "sample_id"),
        *("label", *_MISMATCHED, "mismatched_ref_logp"),
    ],
    needs=call_fields,
)
def kto_train(c: StepContext, samples: Batch, *, actor: ActorRole) -> Batch:
    """Train the policy with KTO: `ppo_epochs` passes over the examples, one optimizer step per mini-batch."""
    train_actor(c, samples, lambda mini: example_step(c, mini, actor))
    count_tokens(c, samples)
    return samples


def example_step(c: StepContext, mini: Batch, actor: ActorRole) -> Metrics:
    """Take one optimizer step on this rank's examples of a mini-batch, with the KL baseline from before the step."""
    from megarl.algorithms.kto import kto_loss

    settings = settings_of(c)
    z, counts = _baseline(c, _sums(mini, actor.log_probs(mismatched(mini)), mini["mismatched_ref_logp"]))

    def loss(logp: Tensor, entropy: Tensor, micro: Batch) -> tuple[Tensor, Metrics]:
        labels = micro["label"].to(logp.device)
        return kto_loss(logp, responses_of(micro, logp.device), labels, z, settings, counts, dtype_of(c))

    metrics = actor.train_step(mini, loss)
    metrics.mean("preference/kl", z, 1)
    return metrics


def measure_examples(c: StepContext, rounds: Iterable[Batch], actor: ActorRole, reference: ReferenceRole) -> Metrics:
    """Return metrics of loss and rewards on held-out examples, with one KL baseline for all of them. Collective.

    Args:
        rounds: batches of examples; a batch may be empty on this rank.
    """
    import torch

    from megarl.algorithms.kto import kto_loss

    settings = settings_of(c)
    sums, parts = torch.zeros(3, dtype=torch.float64), []
    for examples in rounds:
        other = mismatched(examples)
        sums += _sums(examples, actor.score(other), reference.score(other))
        logp = actor.score(examples)
        examples.set("ref_logp", reference.score(examples))
        if len(examples):
            parts.append((logp.values, responses_of(examples, "cpu"), examples["label"]))
    z, counts = _baseline(c, sums)
    metrics = Metrics()
    for values, responses, labels in parts:
        metrics.merge(kto_loss(values, responses, labels, z, settings, counts, dtype_of(c))[1])
        metrics.mean("preference/kl", z * len(labels), len(labels))
    return metrics


def mismatched(samples: Batch) -> Batch:
    """Return the samples with each response replaced by the response to another prompt (its mismatched response)."""
    other = samples.copy()
    other.set("response_ids", samples["mismatched_ids"])
    return other


def _sums(samples: Batch, logp: Jagged, ref_logp: Jagged) -> Tensor:
    """Return float64 [3]: the sum of log-ratios, and the numbers of desirable and undesirable examples.

    `logp` and `ref_logp` are log-probs of mismatched responses under policy and reference.
    """
    import torch

    ratios = (logp.values.double() - ref_logp.values.double())[samples["mismatched_mask"].values]
    labels = samples["label"]
    return torch.tensor([float(ratios.sum()), int(labels.sum()), int((~labels).sum())], dtype=torch.float64)


def _baseline(c: StepContext, sums: Tensor) -> tuple[float, Counts]:
    """Return the KL baseline and the counts of examples over all ranks, from each rank's `_sums`. Collective."""
    from megarl.algorithms.kto import Counts, baseline

    total, desirable, undesirable = c.all_sum(sums).tolist()
    counts = Counts(desirable, undesirable)
    return baseline(total, counts.all), counts
