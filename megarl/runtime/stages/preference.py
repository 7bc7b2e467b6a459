"""The update on preference pairs; the maths is in `megarl.algorithms.preference`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megarl.dag.stage import Kind, Role, stage
from megarl.data.fields import IMAGES
from megarl.data.groups import ORDINAL
from megarl.runtime.stages.needs import call_fields
from megarl.runtime.stages.resampling import COPIES
from megarl.runtime.stages.update import train_actor
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megarl.algorithms.preference import Responses
    from megarl.config.run import RunConfig
    from megarl.config.training import PreferenceConfig
    from megarl.data.batch import Batch
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
    "margin",
    *IMAGES,
)
_PAIR = 2  # number of samples of a pair, which are never in different micro-batches

#: Declares a stage that trains the policy on preference data, with the fields that mini-batches use.
trains = partial(stage, optional=[ORDINAL, COPIES], writes=[], kind=Kind.MODEL_TRAIN, role=Role.ACTOR)


@trains(
    reads=["prompt_ids", "response_ids", "response_mask", "ref_logp", "uid", "sample_id"],
    needs=call_fields,
)
def dpo_train(c: StepContext, samples: Batch, *, actor: ActorRole) -> Batch:
    """Train the policy on pairs: `ppo_epochs` passes over the pairs, one optimizer step per mini-batch."""
    train_actor(c, samples, lambda mini: pair_step(c, mini, actor))
    count_tokens(c, samples)
    return samples


def pair_step(c: StepContext, mini: Batch, actor: ActorRole) -> Metrics:
    """Take one optimizer step on this rank's pairs of a mini-batch."""
    from megarl.algorithms.preference import local_pair_counts, preference_loss

    settings, mask = settings_of(c), mini["response_mask"]
    counts = c.all_sum(local_pair_counts(mask.values, mask.offsets))

    def loss(logp: Tensor, entropy: Tensor, micro: Batch) -> tuple[Tensor, Metrics]:
        return preference_loss(logp, responses_of(micro, logp.device), settings, counts, dtype_of(c))

    return actor.train_step(mini, loss, unit=_PAIR)


def count_tokens(c: StepContext, samples: Batch) -> None:
    """Record the number of tokens of the step's samples."""
    columns = sum(map(sum, c.sequences.sample_columns(samples)))
    c.metrics.sum("perf/total_tokens", float(columns))


def margin_fields(config: RunConfig) -> list[str]:
    """List the fields that a reward model's update reads in addition to tokens."""
    return [] if config.preference is None or config.preference.margin_key is None else ["margin"]


@trains(reads=["prompt_ids", "response_ids", "uid", "sample_id"], needs=margin_fields)
def reward_model_train(c: StepContext, samples: Batch, *, actor: ActorRole) -> Batch:
    """Train a reward model: `ppo_epochs` passes over the pairs, one optimizer step per mini-batch."""
    train_actor(c, samples, lambda mini: score_step(c, mini, actor), head=False)
    count_tokens(c, samples)
    return samples


def score_step(c: StepContext, mini: Batch, actor: ActorRole) -> Metrics:
    """Take one optimizer step of a reward model on this rank's pairs of a mini-batch."""
    import torch

    from megarl.algorithms.preference import score_loss

    settings = settings_of(c)
    pairs = float(c.all_sum(torch.tensor([len(mini) / _PAIR], dtype=torch.float64)))

    def loss(scores: Tensor, micro: Batch) -> tuple[Tensor, Metrics]:
        return score_loss(scores, _margins(micro, settings, scores.device), settings, pairs, dtype_of(c))

    return actor.score_step(sequences_of(mini), loss, unit=_PAIR)


def sequences_of(samples: Batch) -> Batch:
    """Return samples with the whole sequence as prompt and one dummy token as response, so that each gets one score.

    The score is computed at the last token of the sequence, as transformers' classifiers do.
    """
    from megarl.data.batch import Jagged

    prompts, responses = samples["prompt_ids"], samples["response_ids"]
    both = [row for pair in zip(prompts.unbind(), responses.unbind(), strict=True) for row in pair]
    ends = responses.offsets[1:] - 1
    sequences = samples.copy()
    if both:
        values = Jagged.from_list(both).values
        sequences.set("prompt_ids", Jagged.from_lengths(values, prompts.lengths + responses.lengths))
        dummies = Jagged.from_lengths(responses.values[ends], responses.lengths.new_ones(len(ends)))
        sequences.set("response_ids", dummies)
    return sequences


def _margins(samples: Batch, settings: PreferenceConfig, device: torch.device | str) -> Tensor | None:
    return None if settings.margin_key is None else samples["margin"][::_PAIR].to(device)


def measure_pairs(c: StepContext, pairs: Batch, actor: ActorRole, reference: ReferenceRole | None) -> Metrics:
    """Return metrics of loss and rewards on held-out pairs; a rank may have no pairs. Collective.

    Args:
        reference: the policy's reference; None: the actor is a reward model.
    """
    import torch

    from megarl.algorithms.preference import preference_loss, score_loss

    settings = settings_of(c)
    if reference is None:
        scores = actor.scores(sequences_of(pairs)).values
        margins = _margins(pairs, settings, "cpu")
        return score_loss(scores, margins, settings, 1.0, dtype_of(c))[1] if len(pairs) else Metrics()
    logp = actor.score(pairs)
    pairs.set("ref_logp", reference.score(pairs))
    if not len(pairs):
        return Metrics()
    return preference_loss(logp.values, responses_of(pairs, "cpu"), settings, torch.ones(2), dtype_of(c))[1]


def settings_of(c: StepContext) -> PreferenceConfig:
    """Return the section `preference` of a recipe that trains on preference data."""
    assert c.config.preference is not None, "the pipeline requires the section preference"
    return c.config.preference


def dtype_of(c: StepContext) -> torch.dtype:
    """Return the dtype of the run's models."""
    from megarl.system.device import DTYPES

    return DTYPES[c.config.model.dtype]


def responses_of(samples: Batch, device: torch.device | str) -> Responses:
    """Return the response masks and reference log-probs of the samples, on `device`."""
    from megarl.algorithms.preference import Responses

    mask = samples["response_mask"].to(device)
    return Responses(mask.values, mask.offsets, samples["ref_logp"].values.to(device))
