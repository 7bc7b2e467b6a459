"""The recipe's section `policies`: several policies that play one episode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.algorithm import AdvantageConfig
from megarl.config.base import Section
from megarl.config.rollout import SamplingConfig, StopString

#: Keys of `TurnSamplingConfig` that change the distribution of tokens.
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")


class TurnSamplingConfig(Section):
    """How the turns of one of several policies are sampled in training, in addition to rollout.sampling."""

    temperature: PositiveFloat | None = Field(
        None, le=100, description="of a policy with a model of its own; null: as rollout.sampling"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="as temperature")
    top_k: NonNegativeInt | None = Field(None, description="as temperature")
    min_p: float | None = Field(None, ge=0, lt=1, description="as temperature")
    max_new_tokens: PositiveInt | None = Field(
        None, description="maximum tokens of a turn, end token included; null: as rollout.sampling"
    )
    stop: list[StopString] = Field(
        default_factory=list, description="strings that end a turn, in addition to those of rollout.sampling"
    )

    def after(self, common: SamplingConfig) -> SamplingConfig:
        """Return the run's sampling `common` with what these settings change in the distribution of tokens."""
        return common.model_copy(update=self.model_dump(include={*DISTRIBUTION}, exclude_none=True))


class PolicyRewardConfig(Section):
    """The reward function of one of several policies."""

    name: str = Field(description="function of this reward, in the forms of reward.name")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    mode: Literal["batch", "sequential"] | None = Field(
        None, description="as reward.mode; null: the value of reward.mode"
    )


class AgentPolicyConfig(Section):
    """One of several policies, which an agent calls by its name (`model`)."""

    model: str | None = Field(
        None,
        description="its weights: a name in `models`; null: those of the run's policy, which all such policies share",
    )
    train: bool = Field(True, description="train on its turns; false: they are only context of other policies' turns")
    sampling: TurnSamplingConfig = Field(
        default_factory=TurnSamplingConfig, description="how its turns are sampled, in addition to rollout.sampling"
    )
    reward: PolicyRewardConfig | None = Field(
        None,
        description="reward function that scores its conversations, where the environment leaves scores to reward "
        "functions; null: `reward`. Deadlines, processes and failures are those of `reward`",
    )
    advantage: AdvantageConfig | None = Field(
        None, description="its advantage estimator, which sees no other policy's samples; null: algorithm.advantage"
    )
    compare: Literal["prompt", "episode"] = Field(
        "prompt",
        description="which of its samples are a group for the estimator. prompt: those of a prompt; episode: those of "
        "an episode, for which the agent gives a list of rewards",
    )
