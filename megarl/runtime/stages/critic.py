"""The value model of PPO: predictions before the update, and its own update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.losses import value_loss
from megarl.algorithms.stats import explained_variance
from megarl.dag.stage import Kind, Role, stage
from megarl.data.fields import VALUE_MASK
from megarl.data.groups import ORDINAL
from megarl.runtime.stages.needs import call_fields
from megarl.runtime.stages.resampling import COPIES

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.data.batch import Batch, Jagged
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import CriticRole
    from megarl.system.metrics import Metrics


@stage(
    reads=["prompt_ids", "response_ids"],
    needs=call_fields,
    writes=["values"],
    kind=Kind.MODEL_INFERENCE,
    role=Role.CRITIC,
)
def value(c: StepContext, samples: Batch, *, critic: CriticRole) -> Batch:
    """Predict the return at every response token, from the tokens before it."""
    samples.set("values", critic.values(samples))
    return samples


@stage(
    reads=["prompt_ids", "response_ids", "response_mask", "values", "returns", "uid"],
    optional=["sample_id", ORDINAL, COPIES, VALUE_MASK],
    needs=call_fields,
    writes=[],
    kind=Kind.MODEL_TRAIN,
    role=Role.CRITIC,
)
def critic_train(c: StepContext, samples: Batch, *, critic: CriticRole) -> Batch:
    """Train the critic: `critic.ppo_epochs` passes over the samples, one optimizer step per mini-batch.

    The targets are the returns of the tokens in `value_mask`, or in `response_mask` if samples have no `value_mask`.
    """
    from megarl.runtime.stages.update import mini_batches

    settings = c.config.critic
    _record(c, samples)
    for epoch in range(settings.ppo_epochs):
        for mini in mini_batches(c, samples, "critic", epoch):
            metrics = critic_step(c, mini, critic)
            c.count_pass(mini, train=True, head=False)
            if c.layout.rank == 0:  # `metrics` already covers all ranks, so only one rank adds them
                c.metrics.merge(metrics)
    return samples


def critic_step(c: StepContext, mini: Batch, critic: CriticRole) -> Metrics:
    """Take one optimizer step on the mini-batch's value loss over all ranks, aggregated by `critic.aggregation`."""
    from megarl.algorithms.aggregation import aggregation_weights, local_counts

    mask, settings = _value_mask(mini), c.config.critic
    copies = mini[COPIES] if COPIES in mini else None  # noqa: SIM401 (a Batch has no get)
    tokens = float(c.all_sum(local_counts(mask.values, mask.offsets))[0])
    counts = c.all_sum(local_counts(mask.values, mask.offsets, copies=copies))
    weights = aggregation_weights(
        settings.aggregation, mask.values, counts, offsets=mask.offsets, sum_norm=settings.sum_norm, copies=copies
    )
    mini.set("value_weights", mask.like(weights))

    def loss(values: Tensor, micro: Batch) -> tuple[Tensor, Metrics]:
        old, returns, valid, weights = (
            field.values.to(values.device)
            for field in (micro["values"], micro["returns"], _value_mask(micro), micro["value_weights"])
        )
        token_loss, metrics = value_loss(values, old, returns, valid, clip=settings.value_clip)
        total = (weights * token_loss).sum()
        # The weights of all micro-batches add up to 1 per mini-batch, so the metric is the mean over mini-batches.
        metrics.mean("critic/vf_loss", total.item(), float(valid.sum()) / max(tokens, 1.0))
        return total, metrics

    return critic.train_step(mini, loss)


def _value_mask(samples: Batch) -> Jagged:
    """Return the mask of the tokens whose values are used: `value_mask`, or without this field `response_mask`."""
    return samples[VALUE_MASK if VALUE_MASK in samples else "response_mask"]


def _record(c: StepContext, samples: Batch) -> None:
    """Record the explained variance of the values predicted before the update, and the mean return."""
    values, returns, mask = samples["values"].values, samples["returns"].values, _value_mask(samples).values
    share = explained_variance(values, returns, mask, all_sum=c.all_sum)
    if share is not None:
        c.metrics.mean("critic/vf_explained_var", share, 1)  # equal on all ranks, and so is its mean
    c.metrics.mean("critic/returns/mean", float(returns[mask].double().sum()), float(mask.sum()))
