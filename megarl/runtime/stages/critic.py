"""The value model of PPO: predictions before the update, and its own update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import stage

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.controller import Controller


@stage(reads=["prompt_ids", "response_ids"], writes=["values"])
def value(c: Controller, samples: Batch) -> Batch:
    """Predict the return at every response token."""
    assert c.critic is not None, "checks refuse a graph with a critic where there is none"
    samples.set("values", c.critic.values(samples))
    return samples


@stage(reads=["prompt_ids", "response_ids", "response_mask", "values", "returns"], writes=[])
def critic_train(c: Controller, samples: Batch) -> Batch:
    """One pass of value updates over the samples."""
    assert c.critic is not None, "checks refuse a graph with a critic where there is none"
    metrics = c.critic.train(samples)
    if c.layout.rank == 0:  # already merged over all ranks
        c.metrics.merge(metrics)
    return samples
