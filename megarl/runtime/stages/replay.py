"""Replay: groups of earlier steps that are trained on again, with the log-probs and advantages that they had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role, stage
from megarl.data.groups import ORDINAL
from megarl.data.versions import VERSION_FIELDS
from megarl.runtime.stages.needs import update_fields

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext


@stage(
    reads=[
        *(
            "uid",
            "sample_id",
            "score",
            "advantages",
            "prompt_ids",
            "response_ids",
            "response_mask",
            "rollout_logp",
            "old_logp",
        ),
        *VERSION_FIELDS,
    ],
    needs=update_fields,
    optional=[ORDINAL],
    writes=[ORDINAL],
    role=Role.ADVANTAGE,
    resamples=True,
)
def replay(c: StepContext, samples: Batch) -> Batch:
    """Return the step's samples and the replayed ones (`data.replay`), and store the groups of this step.

    A replayed sample keeps its log-probs, its weight versions, and the advantage in its own group.
    """
    from megarl.data.batch import Batch

    if c.replay is None:
        raise ValueError(
            "the node replay needs data.replay, and must be in the actor's team, which stores the groups to train on "
            "again"
        )
    # The guarded batch `samples` refuses to read undeclared fields, but the store keeps all fields for later steps.
    return c.replay.joined(c, Batch(samples.fields, samples.columns, size=len(samples)))
