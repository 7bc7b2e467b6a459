"""Dynamic sampling: keep the groups that carry a signal, and generate more until the batch is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import stage
from megarl.errors import MegarlError

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.controller import Controller


class NoSignalError(MegarlError):
    """Too few groups carry a signal; the message shows how the groups scored."""


@stage(reads=["score", "uid"], writes=[])
def dynamic_sampling(c: Controller, samples: Batch) -> Batch:
    """Samples of this rank's share of `data.batch_size` groups, all of which vary in their score.

    Each rank fills its own share, but all ranks draw another round while any of them needs one, so that generation
    stays in step. What is left over is kept for the next step.
    """
    from megarl.data.batch import Batch as Samples
    from megarl.runtime.stages import reward, rollout

    if not c.config.algorithm.dynamic_sampling.enabled:
        return samples
    assert c.loader is not None, "checks refuse a training run without data"
    wanted = share(c)
    kept = Samples.concat([*c.surplus, keep_signal(c, samples)])
    rounds, limit = 1, c.config.algorithm.dynamic_sampling.max_rounds
    while c.all_max(wanted - len(kept)) > 0:
        if rounds == limit:
            raise NoSignalError(_no_signal(c, samples, rounds, len(kept), wanted))
        samples = reward.reward(c, reward.reward_submit(c, rollout.rollout(c, next(c.loader))))
        kept = Samples.concat([kept, keep_signal(c, samples)])
        rounds += 1
    c.metrics.max("sampling/rounds", rounds)
    batch, rest = kept.split([wanted, len(kept) - wanted])
    c.surplus = [rest] if len(rest) else []
    return batch


def share(c: Controller) -> int:
    """Samples of a training step that are this rank's."""
    return len(range(c.layout.dp_rank, c.config.data.batch_size, c.layout.dp_size)) * c.config.rollout.sampling.n


def keep_signal(c: Controller, samples: Batch) -> Batch:
    """The samples of groups whose scores differ."""
    from megarl.algorithms.group_filter import group_filter

    keep = group_filter(samples["score"], samples["uid"])
    c.metrics.mean("sampling/kept", float(keep.sum()), len(samples))
    return samples.select(keep)


def _no_signal(c: Controller, samples: Batch, rounds: int, have: int, wanted: int) -> str:
    from megarl.algorithms.group_filter import success_histogram

    counts = success_histogram(samples["score"], samples["uid"])
    return (
        f"after {rounds} rounds of generation rank {c.layout.rank} has {have} of {wanted} samples whose group carries "
        f"a signal\n  groups of the last round by mean score: {counts}\n"
        "  fix:     choose easier or harder prompts, raise rollout.sampling.n or the temperature, or raise "
        "algorithm.dynamic_sampling.max_rounds"
    )
