"""Rollout correction: measure and correct the gap between the policy that generated the samples and the trained one.

In decoupled mode a node does this between old log-probs and advantage. In bypass mode, and if a single update needs no
old log-probs, the ratio is known only in the update: `megarl.algorithms.objective` corrects per micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role, stage
from megarl.data.fields import EXPERT_MASK
from megarl.data.versions import VERSION_FIELDS, tokens_by_version

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.correction import Correction
    from megarl.config.correction import ResolvedCorrection
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext
    from megarl.system.metrics import Metrics


#: Fields from which the gap between rollout and old log-probs, and the off-policy steps, are measured.
_MEASURED = ["old_logp", "rollout_logp", "response_mask", *VERSION_FIELDS]


@stage(reads=_MEASURED, optional=[EXPERT_MASK], writes=["loss_mask", "keep", "is_weights"], role=Role.ACTOR)
def rollout_correction(c: StepContext, samples: Batch) -> Batch:
    """Compute importance weights and rejected tokens from the ratio pi_old / pi_rollout.

    The result `loss_mask` is used by losses and their normalisers; `keep` is False for samples that do not count in
    their group's baseline.
    """
    correction = c.config.rollout_correction.resolved()
    mask, result = samples["response_mask"], _measure(c, samples, correction)
    samples.set("loss_mask", mask.like(result.mask))
    samples.set("is_weights", mask.like(result.weights))
    keep = result.keep if correction.rs_affects_baseline else result.keep.new_ones(len(samples))
    samples.set("keep", keep)
    return samples


@stage(reads=_MEASURED, optional=[EXPERT_MASK], writes=[], role=Role.ACTOR)
def rollout_gap(c: StepContext, samples: Batch) -> Batch:
    """Record metrics of the ratio pi_old / pi_rollout without changing samples."""
    _measure(c, samples, c.config.rollout_correction.resolved())
    return samples


@stage(reads=["rollout_logp"], writes=["old_logp"], role=Role.ACTOR)
def rollout_as_old(c: StepContext, samples: Batch) -> Batch:
    """Use the rollout log-probs as old log-probs (bypass mode), without a forward pass."""
    samples.set("old_logp", samples["rollout_logp"])
    return samples


def _measure(c: StepContext, samples: Batch, correction: ResolvedCorrection) -> Correction:
    from megarl.algorithms.correction import correct, finish, rules_of

    mask = samples["response_mask"]
    result = correct(
        samples["old_logp"].values,
        samples["rollout_logp"].values,
        mask.values,
        offsets=mask.offsets,
        is_level=correction.is_level,
        is_threshold=correction.is_threshold,
        is_batch_normalize=correction.is_batch_normalize,
        is_normalize_over=correction.is_normalize_over,
        rules=rules_of(correction),
        veto=correction.veto_threshold,
        outside=outside_tokens(samples),
        all_sum=c.all_sum,
    )
    moments = result.moments.merge(ages(c, samples))
    merged = finish(c.layout.dp_group.reduce_metrics(moments))
    if c.layout.rank == 0:  # the metrics are already merged over all ranks
        c.metrics.merge(merged)
    return result


def outside_tokens(samples: Batch) -> Tensor | None:
    """Return the mask, bool [N], of expert tokens without a log-prob of the policy that wrote them; None without
    experts.
    """
    if EXPERT_MASK not in samples:
        return None
    return samples[EXPERT_MASK].values & samples["rollout_logp"].values.isnan()


def ages(c: StepContext, samples: Batch) -> Metrics:
    """Return metrics of the off-policy steps of this rank's generated tokens; an environment's tokens do not count."""
    from megarl.algorithms.correction import staleness

    mask = samples["response_mask"].values
    mask = mask & ~samples[EXPERT_MASK].values if EXPERT_MASK in samples else mask
    versions, tokens = tokens_by_version(samples, mask)
    replay = c.config.data.replay
    buckets = max(c.config.rollout.stale_steps + c.config.async_.max_staleness, replay.max_age if replay else 0) + 2
    return staleness(versions, tokens, c.step - 1, buckets)
