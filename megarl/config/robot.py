"""The recipe's section `robot`: a policy that acts, with simulator episodes in place of responses to prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.base import Section


class EpisodeRewardConfig(Section):
    """The scoring of episodes."""

    name: Literal["success", "progress"] = Field(
        "success",
        description="success: 1 for an episode that succeeded, else 0; progress: a failure scores by how near it came"
        " to its task's successes (SRPO)",
    )
    coef: PositiveFloat = Field(1.0, description="what scores are multiplied by")
    srpo: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of `progress`: radius, eps, mapping, weight, bank, shuffled; docs/embodied.md",
    )
    embedding: dict[str, Any] = Field(
        default_factory=lambda: {"name": "state"},
        description="what `progress` compares episodes by: `name` and its own keys, see docs/embodied.md",
    )


class RobotConfig(Section):
    """A policy that acts in a simulator. `data.train_files` and `data.val_files` are [simulator] then."""

    simulator: dict[str, Any] = Field(
        default_factory=dict, description="its `name`, `workers`, ..., and its own keys: see docs/embodied.md"
    )
    dim: PositiveInt = Field(1, description="numbers of an action, D")
    chunk: PositiveInt = Field(1, description="actions of a policy call, K")
    cameras: list[str] = Field(default_factory=list, description="cameras of the policy, in its order")
    family: Literal["openvla-oft", "openvla", "small"] = Field(
        "openvla-oft",
        description="form of a policy call. openvla-oft: all tokens in one pass; openvla: one after another; small: "
        "as openvla-oft, and the prompt is the instruction",
    )
    block_only: bool = Field(
        False,
        description="only action tokens attend both ways; false: every column does, as in published policies",
    )
    pictures: Literal["plain", "libero", "aloha", "robotwin"] = Field(
        "plain",
        description="how a frame is prepared for the policy, at the model's size; see docs/vla.md",
    )
    unnorm_key: str | None = Field(
        None,
        description="data set of the model's dataset_statistics.json that scales actions; null: the only one",
    )
    statistics: Literal["model", "demonstrations"] = Field(
        "model",
        description="scales of actions and states. model: dataset_statistics.json beside it, or nothing for a fresh "
        "policy; demonstrations: statistics of sft.train_files, for a new robot",
    )
    recorded_cameras: dict[str, str] = Field(
        default_factory=dict,
        description="of LeRobot's data sets: their names of the simulator's cameras, as `agentview: "
        "observation.images.image`",
    )
    bounds: Literal["q99", "minmax"] = Field(
        "q99",
        description="statistics of an action that become -1 and 1: 1% and 99% quantiles, or minimum and maximum",
    )
    gripper: Literal["none", "libero"] = Field("none", description="what the simulator means by open and closed")
    halves: bool = Field(True, description="simulate one half of the episodes while the policy acts in the other")
    on_error: Literal["fail", "mark"] = Field(
        "mark", description="when a simulator fails: end the run, or leave the episode out and count it"
    )
    held_out: NonNegativeInt = Field(
        10, description="held-out start states of each task, measured in validation; chosen by trainer.seed"
    )
    val_trained: NonNegativeInt = Field(
        0, description="start states of each task that are trained on and also measured: data source TASK_train_iid"
    )
    val_evaluation: NonNegativeInt | None = Field(
        None,
        description="measured start states of the simulator's own evaluation list (robotwin's `eval_seeds`); data "
        "source TASK_eval_ood; null: all",
    )
    trials: PositiveInt | None = Field(
        None, description="start states of each task that are trained on; null: all others"
    )
    reward: EpisodeRewardConfig = Field(default_factory=lambda: EpisodeRewardConfig(), description="scores of episodes")
    demonstrations: PositiveInt | None = Field(
        None,
        description="start states of each task that experts show (sft.train_files=[experts]); null: all trained on",
    )
    expert_noise: NonNegativeFloat = Field(
        0.0,
        description="standard deviation of the noise on experts' executed actions; their own action is recorded, so "
        "that the policy learns to recover",
    )
