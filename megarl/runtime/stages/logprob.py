"""Log-probs of the samples under the policy before the update, the reference, and the teacher."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from megarl.algorithms.divergences import chosen_divergence
from megarl.algorithms.needs import component_fields
from megarl.dag.stage import Kind, Role, stage
from megarl.runtime.stages.needs import policy_fields, scored_fields, teacher_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from megarl.data.batch import Batch, Jagged
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import ActorRole, ReferenceRole, TeacherRole


#: Values of a surplus sample (dynamic sampling) under the policy of the step that generated it; NaN: a new sample.
SURPLUS_LOGP, SURPLUS_SUM = "surplus_logp", "surplus_sum_pi_squared"


#: Declares a stage in which a model reads prompts and responses.
_scores = partial(stage, reads=["prompt_ids", "response_ids"], needs=scored_fields, kind=Kind.MODEL_INFERENCE)


@_scores(optional=[SURPLUS_LOGP], needs=policy_fields, writes=["old_logp"], role=Role.ACTOR)
def old_logp(c: StepContext, samples: Batch, *, actor: ActorRole) -> Batch:
    """Score the responses with the policy before the update; surplus samples keep their earlier log-probs."""
    samples.set("old_logp", _scored_once(samples, SURPLUS_LOGP, actor.log_probs))
    return samples


@_scores(
    reads=["prompt_ids", "response_ids", "old_logp"],
    optional=[SURPLUS_SUM],
    needs=policy_fields,
    writes=["sum_pi_squared"],
    role=Role.ACTOR,
)
def sum_pi_squared(c: StepContext, samples: Batch, *, actor: ActorRole) -> Batch:
    """Compute the sum over the vocabulary of pi(v)^2 at every response token, for the optimal token baselines.

    At half the temperature a token's log-prob is 2 log pi(y) - log sum pi(v)^2, so a second scoring pass is enough.
    Both passes use the same policy, also for surplus samples of an earlier step.
    """
    samples.set("sum_pi_squared", _scored_once(samples, SURPLUS_SUM, lambda some: _sum_pi_squared(c, some, actor)))
    return samples


def score_surplus(c: StepContext, samples: Batch, actor: ActorRole) -> Batch:
    """Return surplus samples, which a later step trains on, with their log-probs under this step's policy.

    PPO's ratio and clipping refer to the policy that generated a sample, which no longer exists in the later step. In
    bypass mode the rollout log-probs are used instead.
    """
    if c.config.rollout_correction.resolved().bypass:
        return samples.drop([SURPLUS_LOGP, SURPLUS_SUM])
    samples.set(SURPLUS_LOGP, _scored_once(samples, SURPLUS_LOGP, actor.log_probs))
    if "sum_pi_squared" in component_fields(c.config.algorithm):
        samples.set("old_logp", samples[SURPLUS_LOGP])
        samples.set(SURPLUS_SUM, _scored_once(samples, SURPLUS_SUM, lambda some: _sum_pi_squared(c, some, actor)))
        return samples.drop(["old_logp"])
    return samples.drop([SURPLUS_SUM])


def with_surplus_fields(c: StepContext, fresh: Batch) -> Batch:
    """Add fields of NaN to new samples that only surplus samples, those left over from earlier steps, have."""
    if c.surplus is None:
        return fresh
    import torch

    nan = fresh["response_ids"].like(torch.full_like(fresh["response_ids"].values, math.nan, dtype=torch.float32))
    for name in (SURPLUS_LOGP, SURPLUS_SUM):
        if name in c.surplus:
            fresh.set(name, nan)
    return fresh


def _scored_once(samples: Batch, known: str, score: Callable[[Batch], Jagged]) -> Jagged:
    """Score only the samples without values in field `known`; return all values. Collective like `score`."""
    import torch

    if known not in samples:
        return score(samples)
    before = samples[known]
    new = before.values[before.offsets[:-1]].isnan()  # each sample's first value; no response is empty
    values = before.values.clone()
    values[torch.repeat_interleave(new, before.lengths)] = score(samples.select(new)).values
    return before.like(values)


def _sum_pi_squared(c: StepContext, samples: Batch, actor: ActorRole) -> Jagged:
    sharper, old = actor.log_probs(samples, c.temperature / 2), samples["old_logp"]
    return old.like((2 * old.values - sharper.values).exp().clamp(max=1))


@_scores(writes=["ref_logp"], role=Role.REFERENCE)
def ref_logp(c: StepContext, samples: Batch, *, reference: ReferenceRole) -> Batch:
    """Score the responses with the frozen reference."""
    samples.set("ref_logp", reference.log_probs(samples))
    return samples


@_scores(writes=["ref_hidden"], role=Role.REFERENCE)
def ref_hidden(c: StepContext, samples: Batch, *, reference: ReferenceRole) -> Batch:
    """Compute the frozen reference's hidden state before every response token, which gives its full distribution."""
    samples.set("ref_hidden", reference.hidden_states(samples))
    return samples


@_scores(needs=teacher_fields, writes=["teacher_logp"], role=Role.TEACHER)
def teacher_logp(c: StepContext, samples: Batch, *, teacher: TeacherRole) -> Batch:
    """Score the responses with the frozen teacher."""
    samples.set("teacher_logp", teacher.log_probs(samples))
    return samples


@_scores(needs=teacher_fields, writes=["teacher_hidden"], role=Role.TEACHER)
def teacher_hidden(c: StepContext, samples: Batch, *, teacher: TeacherRole) -> Batch:
    """Compute the frozen teacher's hidden state before every response token, which gives its full distribution."""
    samples.set("teacher_hidden", teacher.hidden_states(samples))
    return samples


@_scores(needs=teacher_fields, writes=["teacher_topk"], role=Role.TEACHER)
def teacher_topk(c: StepContext, samples: Batch, *, teacher: TeacherRole) -> Batch:
    """Compute the frozen teacher's k likeliest tokens at the position of every response token.

    Writes float32 [tokens, k + 1, 2]: ids and log-probs; the last entry stands for all other tokens together.
    """
    chosen = chosen_divergence(c.config.algorithm.distillation)
    assert chosen is not None, "the node is in the graph only for such an estimator"
    samples.set("teacher_topk", teacher.top_tokens(samples, chosen.settings.topk))
    return samples
