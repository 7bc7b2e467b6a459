"""The recipe's section `robot`: a policy that acts, with simulator episodes in place of responses to prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.base import Section


class EpisodeRewardConfig(Section):
    """How episodes are scored."""

    name: Literal["success", "progress"] = Field(
        "success",
        description="success: 1 for an episode that succeeded, else 0; progress: a failed episode scores by how close "
        "it came to successful episodes of its task (SRPO)",
    )
    coef: PositiveFloat = Field(1.0, description="factor of the scores")
    srpo: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of `progress`: radius, eps, mapping, weight, bank, shuffled; see docs/embodied.md",
    )
    embedding: dict[str, Any] = Field(
        default_factory=lambda: {"name": "state"},
        description="embedding by which `progress` compares episodes: `name` and its own keys; see docs/embodied.md",
    )


class RobotConfig(Section):
    """A policy that acts in a simulator. `data.train_files` and `data.val_files` are then [simulator]."""

    simulator: dict[str, Any] = Field(
        default_factory=dict,
        description="the simulator: `name`, `workers`, ..., and its own keys; see docs/embodied.md",
    )
    dim: PositiveInt = Field(1, description="numbers per action, D")
    chunk: PositiveInt = Field(1, description="actions per policy call, K")
    cameras: list[str] = Field(
        default_factory=list, description="cameras whose images the policy gets, in the policy's order"
    )
    family: Literal["openvla-oft", "openvla", "small"] = Field(
        "openvla-oft",
        description="how a policy call produces its action tokens. openvla-oft: all in one pass; openvla: one after "
        "another; small: as openvla-oft, with the bare instruction as prompt",
    )
    block_only: bool = Field(
        False,
        description="only action tokens attend in both directions; false: all tokens do, as in published policies",
    )
    pictures: Literal["plain", "libero", "aloha", "robotwin"] = Field(
        "plain",
        description="how a camera image is prepared for the policy, at the model's image size; see docs/vla.md",
    )
    unnorm_key: str | None = Field(
        None,
        description="data set in the model's dataset_statistics.json whose statistics scale actions; null: the only "
        "one",
    )
    statistics: Literal["model", "demonstrations"] = Field(
        "model",
        description="source of the scales of actions and states. model: dataset_statistics.json beside the model, or "
        "no scaling for a new policy; demonstrations: statistics of sft.train_files, for a new robot",
    )
    recorded_cameras: dict[str, str] = Field(
        default_factory=dict,
        description="for LeRobot data sets: the simulator's camera -> the data set's name for it, such as `agentview: "
        "observation.images.image`",
    )
    bounds: Literal["q99", "minmax"] = Field(
        "q99",
        description="action statistics that are mapped to -1 and 1: 1% and 99% quantiles, or minimum and maximum",
    )
    gripper: Literal["none", "libero"] = Field(
        "none", description="which values the simulator takes for open and closed"
    )
    halves: bool = Field(True, description="simulate one half of the episodes while the policy acts in the other half")
    on_error: Literal["fail", "mark"] = Field(
        "mark", description="what a failing simulator does: end the run, or leave the episode out and count it"
    )
    held_out: NonNegativeInt = Field(
        10,
        description="number of start states of each task that are held out for validation; trainer.seed chooses them",
    )
    val_trained: NonNegativeInt = Field(
        0, description="number of training start states of each task that are also measured; data source TASK_train_iid"
    )
    val_evaluation: NonNegativeInt | None = Field(
        None,
        description="number of measured start states from the simulator's own evaluation list (robotwin's "
        "`eval_seeds`); data source TASK_eval_ood; null: all",
    )
    trials: PositiveInt | None = Field(
        None, description="number of start states of each task for training; null: all that are not held out"
    )
    reward: EpisodeRewardConfig = Field(
        default_factory=lambda: EpisodeRewardConfig(), description="how episodes are scored"
    )
    demonstrations: PositiveInt | None = Field(
        None,
        description="number of start states of each task that experts demonstrate (sft.train_files=[experts]); null: "
        "all training start states",
    )
    expert_noise: NonNegativeFloat = Field(
        0.0,
        description="standard deviation of noise on the executed actions of experts; the recorded action has no "
        "noise, so that the policy learns to recover",
    )
