"""Past success of prompts: the scores of a step's groups, by which `data.curriculum` draws later prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role, stage
from megarl.data.fields import SOURCE, own_places
from megarl.data.lanes import LANE, leads

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext


@stage(reads=["uid", "score"], optional=["env_error", SOURCE, LANE], writes=[], role=Role.REWARD)
def curriculum(c: StepContext, samples: Batch) -> Batch:
    """Record the mean scores of the groups of all replicas; failed episodes and expert responses do not count.

    The scores are those before penalties, and of groups that dynamic sampling drops, too.
    """
    from megarl.data.curriculum import group_means

    if c.curriculum is None:
        raise ValueError(
            "the node curriculum needs data.curriculum, and must be in the team that generates, which draws the prompts"
        )
    failed = samples["env_error"] if "env_error" in samples else [""] * len(samples)
    scores = samples["score"].tolist()
    places = {*own_places(samples)} & {*leads(samples)}
    scored = [(samples["uid"][place], scores[place]) for place in sorted(places) if not failed[place]]
    means = group_means([uid for uid, _ in scored], [score for _, score in scored])
    everywhere: dict[str, float] = {}
    for share in c.layout.dp_group.all_gather_json(means):
        everywhere |= share
    recorded = c.curriculum.record(everywhere)
    if c.layout.rank:
        return samples  # `recorded` has the groups of all ranks, so one rank adds the metrics
    for pool, share in c.curriculum.shares().items():
        c.metrics.max(f"curriculum/{pool}/rows", share)
        scores = [group.score for group in recorded if group.pool == pool]
        c.metrics.mean(f"curriculum/{pool}/drawn", len(scores), max(1, len(recorded)))
        if scores:
            c.metrics.mean(f"curriculum/{pool}/score", sum(scores), len(scores))
    return samples
