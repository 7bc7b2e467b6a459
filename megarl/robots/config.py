"""The recipe's section `robot`: a policy that acts, with simulator episodes in place of responses to prompts.

`EmbeddingSettings` is its mapping `robot.reward.embedding`. Pictures have one field of a batch for each camera.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.base import Section
from megarl.config.components import settings_at
from megarl.system.errors import ConfigError, choose

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

#: Prefixes of the pictures before each policy call, and of the picture after the last call of the episode.
FRAMES, END_FRAMES = "frames/", "end_frames/"
#: Prefix of clips: frames of the whole episode as the simulator rendered them, for scores by a video encoder.
CLIP = "clip/"
#: Fields of a flow-matching policy: the denoising chains of its calls, and the flow time of examples to clone.
CHAIN, FLOW_TIME = "chain", "flow_time"

#: Entry of `data.train_files` and `data.val_files` for start states of the simulator.
SIMULATOR = "simulator"

#: The keys that each embedding reads; all embeddings also read `name`.
_READ = {
    "state": ("points", "end_weight"),
    "own": ("points", "width", "updates", "lr"),
    "vjepa2": ("path", "batch_size", "clip"),
}


class EpisodeRewardConfig(Section):
    """How episodes are scored."""

    name: Literal["success", "progress"] = Field(
        "success",
        description="success: 1 for an episode that succeeded, else 0; progress: a failed episode scores by how close "
        "it came to successful episodes of its task (SRPO)",
    )
    coef: PositiveFloat = Field(1.0, description="factor of the scores")
    per_call: NonNegativeFloat = Field(
        0.0,
        description="with a critic: factor of the change of the simulator's progress in each policy call, which is a "
        "reward of this call beside the episode's score; 0: only the score",
    )
    srpo: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of `progress`: radius, eps, mapping, weight, bank, shuffled; see docs/embodied.md",
    )
    embedding: dict[str, Any] = Field(
        default_factory=lambda: {"name": "state"},
        description="embedding by which `progress` compares episodes: `name` and its own keys; see docs/embodied.md",
    )


class FlowConfig(Section):
    """How a policy of the family pi0 turns noise into actions (docs/vla.md)."""

    steps: PositiveInt = Field(4, description="denoising steps of a policy call")
    noise: PositiveFloat = Field(
        0.5,
        description="level of the noise that each denoising step adds in training, for exploration and log-probs "
        "(Flow-SDE); greedy episodes add none",
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
    family: Literal["openvla-oft", "openvla", "small", "pi0"] = Field(
        "openvla-oft",
        description="how a policy call produces its actions. openvla-oft: as tokens in one pass; openvla: as tokens "
        "one after another; small: as openvla-oft, with the bare instruction as prompt; pi0: an action expert denoises "
        "them, with the bare instruction as prompt",
    )
    flow: FlowConfig = Field(default_factory=lambda: FlowConfig(), description="family pi0: the denoising of actions")
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
    halves: bool = Field(
        True,
        description="simulate one half of the episodes while the policy acts in the other half; with "
        "robot.simulator.batched all are simulated together",
    )
    on_error: Literal["fail", "mark"] = Field(
        "mark", description="what a failing simulator does: end the run, or leave the episode out and count it"
    )
    held_out: NonNegativeInt = Field(
        10,
        description="number of start states of each task that are held out for validation; trainer.seed chooses them",
    )
    held_out_tasks: list[str] = Field(
        default_factory=list,
        description="tasks that are only measured, by their `held_out` start states, and never trained on; data source "
        "TASK_ood, and TASK_iid of the other tasks' held-out start states",
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


class EmbeddingSettings(Section):
    """The mapping `robot.reward.embedding`."""

    name: Literal["state", "own", "vjepa2"] = Field(
        "state",
        description="state: the robot's states along the episode; own: an encoder of images and states that is "
        "trained during the run on its episodes; vjepa2: a published video encoder",
    )
    points: int = Field(
        8, ge=1, description="number of points of an episode that are compared, spread evenly over its policy calls"
    )
    end_weight: float = Field(
        1.0, ge=0, description="`state`: extra weight of the last point, beside the mean over all points; 0: none"
    )
    width: int = Field(32, ge=2, description="`own`: size of the embedding of one point")
    updates: int = Field(4, ge=1, description="`own`: updates of the encoder per training step")
    lr: float = Field(1e-3, gt=0, description="`own`: the encoder's learning rate (Adam)")

    path: str | None = Field(None, description="`vjepa2`: folder or hub name of a VJEPA2Model of transformers")
    clip: Literal["steps", "calls"] = Field(
        "steps",
        description="`vjepa2`: frames of a clip. steps: the simulator renders every environment step, as in SRPO's "
        "paper; calls: the images that the policy saw before each of its calls, which need no extra rendering",
    )
    batch_size: int = Field(4, ge=1, description="`vjepa2`: clips per forward pass")

    @property
    def by_steps(self) -> bool:
        """Whether embeddings need a frame of every environment step."""
        return self.name == "vjepa2" and self.clip == "steps"

    def check(self, where: str) -> None:
        """Raise an error for keys that only another embedding reads, and for `vjepa2` without a path."""
        read = _READ[self.name]
        for key in sorted(self.model_fields_set - {"name", *read}):
            raise ConfigError(
                f"the embedding {self.name!r} does not read this key",
                where=f"{where}.{key}",
                found=getattr(self, key),
                allowed=", ".join(("name", *read)),
                fix=f"remove it, or set {where}.name to an embedding that reads it: "
                + ", ".join(name for name, keys in _READ.items() if key in keys),
            )
        if self.name == "vjepa2" and self.path is None:
            raise ConfigError(
                "the embedding vjepa2 needs a path",
                where=f"{where}.path",
                found=None,
                allowed="a folder or hub name of transformers' VJEPA2Model",
                fix=f"set {where}.path=facebook/vjepa2-vitg-fpc64-384, or to the folder of a downloaded copy",
            )


def robot_of(config: RunConfig) -> RobotConfig:
    """Return the section `robot` of a recipe that has it."""
    assert config.robot is not None, "a recipe with the section `robot`"
    return config.robot


def refuse_other_tasks(held_out_tasks: Sequence[str], tasks: Sequence[str]) -> None:
    """Raise ConfigError if a held-out task (only for validation) is not in `tasks`, or if all tasks are held out."""
    for name in held_out_tasks:
        problem = "a task that is held out for validation is not among the simulator's tasks"
        choose({task: task for task in tasks}, name, problem, where="robot.held_out_tasks")
    if held_out_tasks and not set(tasks) - set(held_out_tasks):
        raise ConfigError(
            "all tasks are held out for validation, so there is none to train on",
            where="robot.held_out_tasks",
            found=list(held_out_tasks),
            allowed=f"at most {len(tasks) - 1} of {len(tasks)} tasks",
            fix="remove a task from robot.held_out_tasks, or add one to robot.simulator.tasks",
        )


def compared_fields(config: RunConfig) -> list[str]:
    """Return the fields by which `progress` scores compare episodes; empty if the reward is `success`."""
    robot = config.robot
    if robot is None or robot.reward.name == "success":
        return []
    embedding = settings_at("robot.reward.embedding", robot.reward.embedding, EmbeddingSettings)
    prefixes = (CLIP,) if embedding.by_steps else (FRAMES, END_FRAMES)
    return ["states", "end_state", *(prefix + camera for prefix in prefixes for camera in robot.cameras)]


def clip_fields(config: RunConfig) -> list[str]:
    """Return the names of the fields with video clips. They are dropped after scoring, because clips take as much
    memory as all other observations."""
    return [name for name in compared_fields(config) if name.startswith(CLIP)]
