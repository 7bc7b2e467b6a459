"""The recipe's section `policies`: several policies that play one episode."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from megarl.config.algorithm import AdvantageConfig
from megarl.config.base import Section
from megarl.config.rollout import StopString


class TurnSamplingConfig(Section):
    """How the turns of one of several policies are sampled, in addition to rollout.sampling."""

    max_new_tokens: PositiveInt | None = Field(
        None, description="maximum tokens of a turn, end token included; null: as rollout.sampling"
    )
    stop: list[StopString] = Field(
        default_factory=list, description="strings that end a turn, in addition to those of rollout.sampling"
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
    advantage: AdvantageConfig | None = Field(
        None, description="its advantage estimator, which sees no other policy's samples; null: algorithm.advantage"
    )
    compare: Literal["prompt", "episode"] = Field(
        "prompt",
        description="which of its samples are a group for the estimator. prompt: those of a prompt; episode: those of "
        "an episode, for which the agent gives a list of rewards",
    )
