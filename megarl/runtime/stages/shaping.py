"""Rewards that depend on the response's form and not on its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import stage

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.controller import Controller


@stage(reads=["token_rewards", "response_ids"], writes=["token_rewards"])
def overlong(c: Controller, samples: Batch) -> Batch:
    """Subtract the soft penalty of responses near the length limit from the reward of their last token.

    `score` stays what the reward function said, so dynamic sampling and accuracy do not see the penalty.
    """
    from megarl.algorithms.overlong import overlong_penalty

    settings = c.config.algorithm.overlong
    assert settings.buffer_tokens is not None, "the node is in the graph only when a buffer is set"
    rewards = samples["token_rewards"]
    penalty = overlong_penalty(
        rewards.lengths,
        max_length=c.config.rollout.sampling.max_new_tokens,
        buffer=settings.buffer_tokens,
        factor=settings.factor,
    )
    values = rewards.values.clone()
    values[rewards.offsets[1:] - 1] += penalty  # no response is empty
    samples.set("token_rewards", rewards.like(values))
    c.metrics.mean("reward/overlong_penalty", float(penalty.double().sum()), len(samples))
    return samples
