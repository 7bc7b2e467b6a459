"""The length penalty on rewards, and filters that mask out samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.algorithms.group_filter import FILTERS, kept_samples, live_rows
from megarl.algorithms.needs import filter_fields
from megarl.algorithms.rows import Rows
from megarl.dag.stage import Role, contract_of, stage
from megarl.data.lanes import EPISODE, LANE, refuse_branches

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext


@stage(reads=["token_rewards"], optional=[EPISODE, LANE], writes=["token_rewards"], role=Role.REWARD)
def overlong(c: StepContext, samples: Batch) -> Batch:
    """Subtract the soft penalty of responses near the length limit from the reward of their last token.

    The field `score` is not changed, so the penalty affects neither dynamic sampling nor accuracy.
    """
    from megarl.algorithms.overlong import overlong_penalty

    refuse_branches(samples, "the length penalty", "algorithm.overlong.buffer_tokens")
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
    values[rewards.offsets[1:] - 1] += penalty  # the last token of each response, which is never empty
    samples.set("token_rewards", rewards.like(values))
    c.metrics.mean("reward/overlong_penalty", float(penalty.double().sum()), len(samples))
    return samples


@stage(
    reads=["score", "uid", "response_mask"],
    needs=lambda config: filter_fields(config.algorithm),
    optional=[EPISODE, LANE],
    writes=["response_mask"],
    role=Role.ADVANTAGE,
)
def filter_samples(c: StepContext, samples: Batch, *, own: Mapping[str, Any] | None = None) -> Batch:
    """Mask out the samples that a filter drops, so that baselines, the loss and its divisor ignore them.

    Args:
        own: settings of this node's own filter, like the section `algorithm.filter`; None: use that section.
    """
    from megarl.config.algorithm import FilterConfig
    from megarl.data.batch import Jagged

    refuse_branches(samples, "the filter", "algorithm.filter")
    mask, section = samples["response_mask"], c.config.algorithm.filter if own is None else FilterConfig(**own)
    fields_read = filter_fields(c.config.algorithm) if own is None else FILTERS.spec(section.name).reads
    read = {name: samples[name] for name in fields_read}
    fields = {name: value.values if isinstance(value, Jagged) else value for name, value in read.items()}
    fields |= {"mask": mask.values, "offsets": mask.offsets}
    fields["live"] = live_rows(mask.values, mask.offsets) if c.config.has_episodes else None
    keep = kept_samples(section, samples["score"], samples["uid"], fields)
    rows = Rows.of(mask.values, mask.offsets)
    samples.set("response_mask", mask.like(mask.values & rows.expand(keep)))
    metric = "filter/kept" if own is None else f"filter/{section.name.rpartition(':')[2]}/kept"
    c.metrics.mean(metric, float(keep.sum()), len(samples))
    return samples


def own_filter(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `Pipeline.add` for a `filter_samples` node with its own filter instead of `algorithm.filter`.

    Args:
        section: name and settings of the filter, in the form of the section `algorithm.filter`.

    Raises:
        UserError: no filter has this name.

    >>> own_filter({"name": "bounds", "high": 0.9})["contract"].reads
    ('score', 'uid', 'response_mask', 'finish_reason')
    """
    declared = contract_of(filter_samples)
    reads = tuple(dict.fromkeys([*declared.reads, *FILTERS.spec(section["name"]).reads]))
    return {"config": {"own": dict(section)}, "contract": replace(declared, reads=reads, needs=None)}
