"""Resampling of a step's samples by their scores (PF-PPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role, stage
from megarl.data.lanes import EPISODE, LANE, refuse_branches

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext

#: int64 [B]: how often a sample is in the batch that is trained on.
COPIES = "copies"


@stage(reads=["score", "sample_id", "response_mask"], optional=[EPISODE, LANE], writes=[COPIES], role=Role.ADVANTAGE)
def resample(c: StepContext, samples: Batch) -> Batch:
    """Draw how often each sample is trained on (field `copies`), from all ranks' samples by `algorithm.resampling`.

    Entirely masked samples get 0. The draws depend on the run's seed, the step and the samples' names, not on ranks or
    positions in the batch.
    """
    import torch

    from megarl.algorithms.group_filter import live_rows
    from megarl.algorithms.resampling import resampled

    refuse_branches(samples, "resampling", "algorithm.resampling")
    mask = samples["response_mask"]
    live = live_rows(mask.values, mask.offsets)
    names, scores = samples["sample_id"], samples["score"].double().tolist()
    pairs = [[names[place], scores[place]] for place in live.nonzero()[:, 0].tolist()]
    everyone = sorted(pair for share in c.layout.dp_group.all_gather_json(pairs) for pair in share)
    of_all = torch.tensor([score for _, score in everyone], dtype=torch.float64)
    copies = resampled(c.config.algorithm.resampling, of_all, c.seeds.resampling(c.step))
    drawn = dict(zip([name for name, _ in everyone], copies.tolist(), strict=True))
    samples.set(COPIES, torch.tensor([drawn.get(name, 0) for name in names], dtype=torch.int64))
    c.metrics.mean("resampling/used", float((samples[COPIES] > 0).sum()), len(pairs))
    c.metrics.max("resampling/copies_max", float(max(copies.tolist(), default=0)))
    c.metrics.mean(
        "resampling/score/mean", float((samples[COPIES] * samples["score"]).sum()), float(samples[COPIES].sum())
    )
    return samples
