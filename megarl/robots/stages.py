"""The stage that scores robots' episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role, stage
from megarl.robots.config import clip_fields, compared_fields
from megarl.runtime.stages.reward import record_groups, record_scores

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext


@stage(
    reads=["uid", "response_ids", "response_mask", "success", "progress", "task", "env_error"],
    needs=compared_fields,
    writes=["score", "token_rewards"],
    role=Role.REWARD,
)
def episode_reward(c: StepContext, samples: Batch) -> Batch:
    """Score episodes by `robot.reward`; the score is the reward of the last executed action token.

    Collective over the team, because `progress` compares the episodes of all ranks.
    """
    import torch

    assert c.scores is not None, "a run with the section `robot` has it"
    score = c.scores.score(samples, c.step, c.metrics)
    samples = samples.drop(clip_fields(c.config))
    mask = samples["response_mask"]
    place = torch.arange(len(mask.values))
    rows = torch.repeat_interleave(torch.arange(len(samples)), mask.lengths)
    # An episode without executed actions is not trained on, so any place will do.
    last = mask.offsets[1:] - 1
    last = torch.where(
        torch.zeros(len(samples), dtype=torch.bool).index_put((rows[mask.values],), torch.tensor(True)),
        torch.full((len(samples),), -1).scatter_reduce(0, rows[mask.values], place[mask.values], "amax"),
        last,
    )
    rewards = torch.zeros(len(mask.values), dtype=torch.float32)
    rewards[last] = score
    samples.set("score", score)
    samples.set("token_rewards", mask.like(rewards))
    played = samples.select([place for place, error in enumerate(samples["env_error"]) if not error])
    record_scores(c, played)
    record_groups(c, played, played["success"].tolist())
    return samples
