"""The stages of robots' episodes: scores, and a critic's value of each policy call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.lazy import Tensor, torch
from megarl.dag.stage import Kind, Role, stage
from megarl.data.fields import VALUE_MASK
from megarl.robots.config import clip_fields, compared_fields, robot_of
from megarl.runtime.stages.needs import call_fields
from megarl.runtime.stages.reward import record_groups, record_scores
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import CriticRole


@stage(
    reads=[
        *("uid", "response_ids", "response_mask", "turn_ends"),
        *("success", "progress", "call_progress", "task", "env_error"),
    ],
    needs=compared_fields,
    writes=["score", "token_rewards"],
    role=Role.REWARD,
)
def episode_reward(c: StepContext, samples: Batch) -> Batch:
    """Score episodes by `robot.reward`; the score is the reward of the last executed action token.

    With `robot.reward.per_call` the change of progress in each policy call is a reward of the call's last executed
    token. Collective over the team, because the scores `progress` compare the episodes of all ranks.
    """
    assert c.scores is not None, "a run with the section `robot` has it"
    score = c.scores.score(samples, c.step, c.metrics)
    samples = samples.drop(clip_fields(c.config))
    mask = samples["response_mask"]
    rewards = torch.zeros(len(mask.values), dtype=torch.float32)
    rewards[_last_executed(mask.values, mask.offsets)] = score
    if factor := robot_of(c.config).reward.per_call:
        calls = call_offsets(samples)
        rewards.index_add_(0, _last_executed(mask.values, calls), factor * _gains(samples))
    samples.set("score", score)
    samples.set("token_rewards", mask.like(rewards))
    played = samples.select([place for place, error in enumerate(samples["env_error"]) if not error])
    record_scores(c, played)
    record_groups(c, played, played["success"].tolist())
    return samples


def call_offsets(samples: Batch) -> Tensor:
    """Return the first token of each policy call among all tokens of the samples, and the number of tokens, int64."""
    mask, ends = samples["response_mask"], samples["turn_ends"]
    last = torch.repeat_interleave(mask.offsets[:-1], ends.lengths) + ends.values
    return torch.cat([last.new_zeros(1), last])


def _last_executed(mask: Tensor, offsets: Tensor) -> Tensor:
    """Return the place of the last token in `mask` of each part of the tokens, int64; of a part without one, which is
    not trained on, its last token.
    """
    places, count = torch.arange(len(mask)), len(offsets) - 1
    parts = torch.repeat_interleave(torch.arange(count), offsets.diff())
    last = torch.full((count,), -1).scatter_reduce(0, parts[mask], places[mask], "amax")
    return torch.where(last < 0, offsets[1:] - 1, last)


def _gains(samples: Batch) -> Tensor:
    """Return the change of progress in each policy call, float32 [calls]; the progress before an episode is 0.

    Raises:
        ConfigError: the simulator does not measure progress.
    """
    progress = samples["call_progress"]
    played = torch.tensor([not error for error in samples["env_error"]], dtype=torch.bool)
    unknown = progress.values.isnan() & torch.repeat_interleave(played, progress.lengths)
    if bool(unknown.any()):
        raise ConfigError(
            "the simulator does not measure progress",
            where="robot.reward.per_call",
            allowed="0 with this simulator",
            fix="set robot.reward.per_call=0",
        )
    before = progress.values.roll(1)
    before[progress.offsets[:-1]] = 0.0  # every episode has a policy call
    return (progress.values - before).nan_to_num(0.0)


@stage(
    reads=["prompt_ids", "response_ids", "response_mask", "turn_ends"],
    needs=call_fields,
    writes=["values", VALUE_MASK],
    kind=Kind.MODEL_INFERENCE,
    role=Role.CRITIC,
)
def call_value(c: StepContext, samples: Batch, *, critic: CriticRole) -> Batch:
    """Predict the return at every policy call, at the column of the prompt's last token.

    This column predicts the call's first action token, so the value stands at this token, and those at other tokens are
    not read (`value_mask`). It depends on what the policy sees, not on the call's actions. Calls whose first token is
    not trained on have no value.
    """
    samples.set("values", critic.values(samples))
    mask, first = samples["response_mask"], call_offsets(samples)[:-1]
    begins = torch.zeros_like(mask.values)
    begins[first] = mask.values[first]
    samples.set(VALUE_MASK, mask.like(begins))
    return samples
