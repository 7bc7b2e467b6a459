"""Log-probs of the samples under the policy before the update, the reference, and the teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import stage

if TYPE_CHECKING:
    from megarl.data.batch import Batch, Jagged
    from megarl.runtime.controller import Controller
    from megarl.training.engine import MegatronEngine


@stage(reads=["prompt_ids", "response_ids"], writes=["old_logp"])
def old_logp(c: Controller, samples: Batch) -> Batch:
    """Score the responses with the policy that is about to be trained."""
    logp, _ = c.actor.logprobs(samples, c.temperature, entropy=False)
    samples.set("old_logp", logp)
    c.count_pass(samples)
    return samples


@stage(reads=["prompt_ids", "response_ids", "old_logp"], writes=["sum_pi_squared"])
def sum_pi_squared(c: Controller, samples: Batch) -> Batch:
    """Sum over the vocabulary of pi(v)^2 at every response token, for the optimal token baselines.

    At half the temperature a token's log-prob is 2 log pi(y) - log sum pi(v)^2, so a second scoring pass gives the sum
    without looking at the vocabulary again.
    """
    sharper, _ = c.actor.logprobs(samples, c.temperature / 2, entropy=False)
    old = samples["old_logp"]
    samples.set("sum_pi_squared", old.like((2 * old.values - sharper.values).exp().clamp(max=1)))
    c.count_pass(samples)
    return samples


@stage(reads=["prompt_ids", "response_ids"], writes=["ref_logp"])
def ref_logp(c: Controller, samples: Batch) -> Batch:
    """Score the responses with the frozen reference."""
    assert c.reference is not None, "a graph with ref_logp needs a reference; config.checks guards this"
    samples.set("ref_logp", _frozen_logp(c, c.reference, samples))
    c.count_pass(samples)
    return samples


@stage(reads=["prompt_ids", "response_ids"], writes=["teacher_logp"])
def teacher_logp(c: Controller, samples: Batch) -> Batch:
    """Score the responses with the frozen teacher."""
    assert c.teacher is not None, "a graph with teacher_logp needs a teacher; config.checks guards this"
    samples.set("teacher_logp", _frozen_logp(c, c.teacher, samples))
    return samples


def _frozen_logp(c: Controller, engine: MegatronEngine, samples: Batch) -> Jagged:
    engine.onload()
    logp, _ = engine.logprobs(samples, c.temperature, entropy=False)
    if c.config.actor.engine.offload:
        engine.offload()
    return logp
