"""What depends on a response's form, or on how its group did: the length penalty, and filters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role, stage
from megarl.runtime.stages.needs import filter_fields

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext


@stage(reads=["token_rewards"], writes=["token_rewards"], role=Role.REWARD)
def overlong(c: StepContext, samples: Batch) -> Batch:
    """Subtract the soft penalty of responses near the length limit from the reward of their last token.

    `score` stays what the reward function said, so dynamic sampling and accuracy do not see the penalty.
    """
    from megarl.algorithms.overlong import overlong_penalty

    settings = c.config.algorithm.overlong
    assert settings.buffer_tokens is not None, "the node is in the graph only when a buffer is set"
    rewards = samples["token_rewards"]
    penalty = overlong_penalty(
        rewards.lengths,
        max_length=c.config.response_tokens(c.config.rollout.sampling),
        buffer=settings.buffer_tokens,
        factor=settings.factor,
    )
    values = rewards.values.clone()
    values[rewards.offsets[1:] - 1] += penalty  # no response is empty
    samples.set("token_rewards", rewards.like(values))
    c.metrics.mean("reward/overlong_penalty", float(penalty.double().sum()), len(samples))
    return samples


@stage(reads=["score", "uid", "response_mask"], needs=filter_fields, writes=["response_mask"], role=Role.ADVANTAGE)
def filter_samples(c: StepContext, samples: Batch) -> Batch:
    """Mask out the samples that `algorithm.filter` leaves out: they take no part in baselines, loss and its divisor."""
    from megarl.algorithms.group_filter import kept_samples, live_rows
    from megarl.algorithms.rows import Rows
    from megarl.data.batch import Jagged

    mask = samples["response_mask"]
    read = {name: samples[name] for name in filter_fields(c.config)}
    fields = {name: value.values if isinstance(value, Jagged) else value for name, value in read.items()}
    fields |= {"mask": mask.values, "offsets": mask.offsets}
    fields["live"] = live_rows(mask.values, mask.offsets) if c.config.has_episodes else None
    keep = kept_samples(c.config.algorithm.filter, samples["score"], samples["uid"], fields)
    rows = Rows.of(mask.values, mask.offsets)
    samples.set("response_mask", mask.like(mask.values & rows.expand(keep)))
    c.metrics.mean("filter/kept", float(keep.sum()), len(samples))
    return samples
