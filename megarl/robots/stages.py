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
    """Score episodes by `robot.reward`; an episode's score is the token reward of its last executed action token.

    With `robot.reward.per_call` the change of progress in each policy call, times this factor, is added to the reward
    of the call's last executed token. Collective over the team, because the reward `progress` compares the episodes of
    all ranks.
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
    """Return, int64 [calls + 1], the index of each policy call's first token among the response tokens of all samples,
    and at the end the number of these tokens."""
    mask, ends = samples["response_mask"], samples["turn_ends"]
    last = torch.repeat_interleave(mask.offsets[:-1], ends.lengths) + ends.values
    return torch.cat([last.new_zeros(1), last])


def _last_executed(mask: Tensor, offsets: Tensor) -> Tensor:
    """Return the index of the last token of each part for which `mask` is true, int64 [parts]; for a part without such
    a token, which is not trained on, the index of its last token.

    Args:
        mask: bool [tokens], tokens of executed actions.
        offsets: int64 [parts + 1], index of the first token of each part, and the number of tokens at the end.
    """
    places, count = torch.arange(len(mask)), len(offsets) - 1
    parts = torch.repeat_interleave(torch.arange(count), offsets.diff())
    last = torch.full((count,), -1).scatter_reduce(0, parts[mask], places[mask], "amax")
    return torch.where(last < 0, offsets[1:] - 1, last)


def _gains(samples: Batch) -> Tensor:
    """Return the change of the simulator's progress (completed part of the task) in each policy call, float32 [calls];
    an episode begins with 0.

    Raises:
        ConfigError: the simulator does not report progress after every call.
    """
    progress = samples["call_progress"]
    played = torch.tensor([not error for error in samples["env_error"]], dtype=torch.bool)
    unknown = progress.values.isnan() & torch.repeat_interleave(played, progress.lengths)
    if bool(unknown.any()):
        raise ConfigError(
            "the simulator does not report progress after every policy call",
            where="robot.reward.per_call",
            allowed="0 with this simulator",
            fix="set robot.reward.per_call=0",
        )
    before = progress.values.roll(1)
    before[progress.offsets[:-1]] = 0.0  # an episode's progress before its first call; every episode has one
    return (progress.values - before).nan_to_num(0.0)


@stage(
    reads=["prompt_ids", "response_ids", "response_mask", "turn_ends"],
    needs=call_fields,
    writes=["values", VALUE_MASK],
    kind=Kind.MODEL_INFERENCE,
    role=Role.CRITIC,
)
def call_value(c: StepContext, samples: Batch, *, critic: CriticRole) -> Batch:
    """Predict the return once for each policy call, with the critic's output at the prompt's last token.

    This output precedes the call's first action token, so the value is stored at that token, and `value_mask` excludes
    the values at all other tokens. The value depends on what the policy sees, not on the call's actions. Calls whose
    first token is not trained on have no value.
    """
    samples.set("values", critic.values(samples))
    mask, first = samples["response_mask"], call_offsets(samples)[:-1]
    begins = torch.zeros_like(mask.values)
    begins[first] = mask.values[first]
    samples.set(VALUE_MASK, mask.like(begins))
    return samples
