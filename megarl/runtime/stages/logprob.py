"""Log-probs of the samples under the policy before the update, and under the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import stage

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.controller import Controller


@stage(reads=["prompt_ids", "response_ids"], writes=["old_logp"])
def old_logp(c: Controller, samples: Batch) -> Batch:
    """Score the responses with the policy that is about to be trained."""
    logp, _ = c.actor.logprobs(samples, c.temperature, entropy=False)
    samples.set("old_logp", logp)
    c.count_pass(samples)
    return samples


@stage(reads=["prompt_ids", "response_ids"], writes=["ref_logp"])
def ref_logp(c: Controller, samples: Batch) -> Batch:
    """Score the responses with the frozen reference."""
    assert c.reference is not None, "a graph with ref_logp needs a reference; config.checks guards this"
    c.reference.onload()
    logp, _ = c.reference.logprobs(samples, c.temperature, entropy=False)
    if c.config.actor.engine.offload:
        c.reference.offload()
    samples.set("ref_logp", logp)
    c.count_pass(samples)
    return samples
