"""The recipe's section `robot`: a policy that acts, with simulator episodes in place of responses to prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.base import Section


class EpisodeRewardConfig(Section):
    """The scoring of episodes."""

    name: Literal["success", "progress"] = Field(
        "success",
        description="success: 1 for an episode that succeeded, else 0; progress: a failure is scored by how near it "
        "came to the successes of its task (SRPO)",
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
    cameras: list[str] = Field(default_factory=list, description="cameras that the policy sees by, in its order")
    family: Literal["openvla-oft", "openvla", "small"] = Field(
        "openvla-oft",
        description="how a policy call looks. openvla-oft: all tokens in one pass; openvla: one after another; small: "
        "as openvla-oft, and the prompt is the instruction",
    )
    block_only: bool = Field(
        False,
        description="only the action tokens see both ways; false: every column does, as published policies have it",
    )
    pictures: Literal["plain", "libero", "aloha", "robotwin"] = Field(
        "plain",
        description="way of a frame to the policy, see docs/vla.md; at the size that the model takes",
    )
    unnorm_key: str | None = Field(
        None,
        description="data set of dataset_statistics.json, beside the model, that scales actions; null: the only one",
    )
    statistics: Literal["model", "demonstrations"] = Field(
        "model",
        description="what scales actions and states: model: dataset_statistics.json beside it, or, of a fresh policy, "
        "nothing; demonstrations: statistics of the files in sft.train_files, for a new robot",
    )
    recorded_cameras: dict[str, str] = Field(
        default_factory=dict,
        description="of LeRobot's data sets: the name there of a camera that the simulator calls otherwise, as "
        "`agentview: observation.images.image`",
    )
    bounds: Literal["q99", "minmax"] = Field(
        "q99",
        description="which statistics of an action become -1 and 1: 1% and 99% quantiles, or smallest and largest",
    )
    gripper: Literal["none", "libero"] = Field("none", description="what the simulator means by open and closed")
    halves: bool = Field(
        True, description="physics of one half of the episodes goes on while the policy acts in the other"
    )
    on_error: Literal["fail", "mark"] = Field(
        "mark", description="a simulator that fails: end the run, or leave the episode out and count it"
    )
    held_out: NonNegativeInt = Field(
        10, description="start states of each task that are held out and measured in validation; by trainer.seed"
    )
    val_trained: NonNegativeInt = Field(
        0, description="start states of each task that are trained on and measured, too: data source TASK_train_iid"
    )
    val_evaluation: NonNegativeInt | None = Field(
        None,
        description="measured start states of the simulator's own list for evaluation, as robotwin's `eval_seeds`; "
        "data source TASK_eval_ood; null: all of it",
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
        description="standard deviation of the noise on experts' executed actions; the expert's own action is "
        "recorded, so that the policy learns to come back",
    )
