"""The whole recipe, and its sections `trainer`, `cluster` and `tracking`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TextIO

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
)

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import Seconds, Section
from megarl.config.correction import RolloutCorrectionConfig
from megarl.config.data import DataConfig, RewardConfig
from megarl.config.launch import LaunchConfig
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.placement import PlacementConfig
from megarl.config.robot import RobotConfig
from megarl.config.rollout import SINGLE_TURN, AsyncConfig, RolloutConfig, SamplingConfig, ValidationConfig
from megarl.config.sync import SyncConfig
from megarl.config.training import (
    ActorConfig,
    CriticConfig,
    PreferenceConfig,
    ReferenceConfig,
    RewardModelConfig,
    SFTConfig,
    TeacherConfig,
)
from megarl.system.errors import ConfigError


class EarlyStopConfig(Section):
    """The end of a run before `trainer.steps`, by one metric."""

    metric: str = Field(
        "val/acc",
        description="watched metric; val/...: at each validation, others at each step",
    )
    mode: Literal["max", "min"] = Field("max", description="max: larger is better; min: smaller is")
    patience: PositiveInt | None = Field(
        None, description="measurements in a row without an improvement that end the run; null: any number"
    )
    min_delta: NonNegativeFloat = Field(0.0, description="an improvement is larger than this")
    target: float | None = Field(None, description="the run ends when the metric is as good as this; null: none")


class TrainerConfig(Section):
    """The training loop: steps, epochs, checkpoints."""

    steps: PositiveInt = Field(100, description="training steps")
    epochs: PositiveFloat | None = Field(
        None,
        description="passes over the training prompts, from which steps are computed, unless a later layer or override "
        "sets `steps`; the next pass fills the last batch; null: steps",
    )
    seed: int = Field(0, description="seed of everything random")
    save_every: NonNegativeInt = Field(0, description="steps between checkpoints; 0: only at the end")
    keep_last: PositiveInt = Field(2, description="checkpoints kept in addition to the best")
    resume_every: NonNegativeInt = Field(
        0,
        description="steps between checkpoints for resuming only, in addition to those of save_every; each is removed"
        " once a newer one is complete; 0: none",
    )
    save_by_s: Seconds | None = Field(
        None,
        description="seconds after the start of the job: the run saves and ends with exit code 0 before its longest "
        "step and save so far would exceed them; null: no limit",
    )
    best_metric: str | None = Field(
        "val/acc",
        description="metric whose best checkpoint is kept, larger is better; with save_every, a better validation "
        "saves one; null: none",
    )
    early_stop: EarlyStopConfig | None = Field(
        None,
        description="end the run, as after its last step, when a metric is good enough or stops improving; null: never",
    )
    resume: Literal["auto", "never"] | str = Field(
        "auto",
        description="auto: newest intact checkpoint of this run folder; never; or a checkpoint folder. Checkpoints "
        "of this run folder that are not continued move to checkpoints.old-K",
    )
    export_hf: bool = Field(True, description="write the final model in Hugging Face form")

    def steps_of(self, prompts: int, batch_size: int) -> int:
        """Return the number of training steps in which `epochs` passes over so many prompts fit."""
        assert self.epochs is not None, "asked of recipes that name them"
        return steps_of_epochs(self.epochs, prompts, batch_size)


class ClusterConfig(Section):
    """Processes, restarts and deadlines."""

    nproc: PositiveInt = Field(1, le=1_000_000, description="worker processes over all nodes, one per device")
    nnodes: PositiveInt = Field(1, le=1_000_000, description="machines")
    device_memory_gb: PositiveFloat | None = Field(
        None,
        le=100_000,
        description="memory of each GPU that the recipe is meant for: estimates are held against it, and the run does"
        " not start without GPUs; null: the machine's",
    )
    threads: PositiveInt | None = Field(
        None, description="CPU threads per worker; null: cores / workers on this machine"
    )
    keep_freed_memory: bool = Field(
        True,
        description="CPU workers keep freed memory for reuse (settings of glibc's malloc): faster",
    )
    timeout_s: Seconds = Field(600.0, description="deadline of every wait on another process")
    start_timeout_s: Seconds = Field(300.0, description="deadline for all workers to report in")
    grace_s: NonNegativeFloat = Field(
        20.0,
        le=31_536_000,
        description="seconds to finish the step and save after SIGTERM or SIGHUP. SIGKILL follows: after 30 s by "
        "Slurm and Kubernetes, after 90 s by systemd",
    )
    max_restarts: NonNegativeInt = Field(
        0,
        description="restarts from the newest checkpoint after a worker was lost; a newer checkpoint resets the "
        "count. Default with several teams or `placement.auto`: 3",
    )


class TrackingConfig(Section):
    """The destinations of metrics."""

    dir: str = Field("runs", description="folder of run folders")
    console: Literal["auto", "plain", "quiet", "json"] = Field(
        "auto",
        description="auto: a line per step, on a terminal with a progress bar; plain: no bar; quiet: only validations"
        " and the final table; json: one JSON object per step on standard output, the rest on standard "
        "error",
    )
    mlflow: bool = Field(True, description="log to MLflow")
    mlflow_uri: str | None = Field(None, description="MLflow tracking URI; null: sqlite:///<dir>/mlflow.db")
    loggers: list[str] = Field(
        [], description="trackers beside MLflow: wandb, tensorboard, trackio, or classes of yours, file.py:Class"
    )
    project: str = Field("megarl", min_length=1, description="project of W&B and trackio, experiment of MLflow")
    report: bool = Field(True, description="write report.html at the end")
    training_groups: int = Field(
        2,
        ge=0,
        le=1000,
        description="training groups kept for the report at the first step, each `validation.every`-th, and the last",
    )
    peak_tflops: PositiveFloat | None = Field(
        None,
        le=1_000_000_000,
        description="peak TFLOP/s per device for MFU; null: the device's known value; measured on a CPU",
    )

    @property
    def messages(self) -> TextIO | None:
        """The `file` to print what is not the record of a step to; None: standard output."""
        return sys.stderr if self.console == "json" else None


def _shown(name: str) -> str:
    """Refuse a name that scripts, terminals and folders would not show as it is."""
    if not name.isprintable():
        raise ValueError("one line of text without control characters")
    return name


class Written(frozenset[str]):
    """Dotted keys that the user wrote. It is no part of what a recipe says: recipes are equal whoever wrote a key."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Written)

    __hash__ = frozenset.__hash__


class RunConfig(Section):
    """One recipe file, resolved."""

    model_config = ConfigDict(serialize_by_alias=True)  # `async` is no name in Python

    name: Annotated[str, AfterValidator(_shown)] = Field(description="run name, also the folder below tracking.dir")
    model: ModelConfig = Field(default_factory=ModelConfig, description="policy")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="objective")
    data: DataConfig = Field(default_factory=DataConfig, description="prompts")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="scores")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="generation")
    env: dict[str, Any] = Field(
        default_factory=lambda: {"name": SINGLE_TURN, "on_error": "fail"},
        description="environment: `name` (single_turn, tools, file.py:Class, pkg.mod:Class), `on_error` (fail: end "
        "the run; mark: leave the episode out and count it), and its own keys",
    )
    robot: RobotConfig | None = Field(None, description="a policy that acts in a simulator; null: a language model")
    sync: SyncConfig = Field(default_factory=SyncConfig, description="weights to generation servers")
    rollout_correction: RolloutCorrectionConfig = Field(
        default_factory=RolloutCorrectionConfig, description="gap between generation and training"
    )
    validation: ValidationConfig = Field(default_factory=ValidationConfig, description="held-out evaluation")
    actor: ActorConfig = Field(default_factory=ActorConfig, description="policy training")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="value training (ppo)")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="reference policy")
    teacher: TeacherConfig = Field(default_factory=TeacherConfig, description="teacher of distillation")
    reward_model: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="model that gives a reward, by the name `reward_model`"
    )
    sft: SFTConfig = Field(default_factory=SFTConfig, description="supervised cold start")
    preference: PreferenceConfig | None = Field(
        None,
        description="learning from better and worse responses (pipelines dpo, kto, reward_model); null: responses are "
        "generated",
    )
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="loop")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="processes")
    placement: PlacementConfig = Field(default_factory=PlacementConfig, description="roles on devices of their own")
    async_: AsyncConfig = Field(
        default_factory=AsyncConfig, alias="async", description="generation that runs ahead of training"
    )
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description="launcher and cluster")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="numbers")
    _written: Written = PrivateAttr(default_factory=Written)
    _given: Written = PrivateAttr(default_factory=Written)

    @property
    def written(self) -> Written:
        """The keys that the user's own recipe file and overrides set, not those of parent recipes."""
        return self._written

    @property
    def given(self) -> Written:
        """The keys that a recipe file, one of its parents or an override sets; empty where no file was read."""
        return self._given

    def with_written(self, keys: Iterable[str], given: Iterable[str]) -> RunConfig:
        """Return the recipe with `keys` as those that the user wrote, and `given` as those that any layer sets."""
        copy = self.model_copy()
        copy._written, copy._given = Written(keys), Written(given)
        return copy

    def longest_sequence(self) -> int:
        """Return the tokens of the longest prompt and response that are generated, held-out ones included."""
        sampled = [self.rollout.sampling, *([self.validation_sampling] if self.data.held_out else [])]
        return self.data.max_prompt_tokens + max(self.response_tokens(sampling) for sampling in sampled)

    def response_tokens(self, sampling: SamplingConfig) -> int:
        """Return the tokens of the longest response: of one turn, or of all turns where an environment answers."""
        return self.rollout.limits.response_tokens(sampling) if self.has_turns else sampling.max_new_tokens

    @property
    def whole_conversations(self) -> bool:
        """Whether the prompt column also holds the responses to learn."""
        return self.data.prompt_key == self.sft.response_key

    @property
    def data_unit(self) -> str:
        """The name of what `data.batch_size` counts."""
        if self.preference is None:
            return "prompt"
        return "example" if self.preference.labelled else "pair"

    @property
    def trains_reward_model(self) -> bool:
        """Whether the actor is a reward model, with one score per sequence in place of a vocabulary."""
        return self.preference is not None and self.preference.scores

    @property
    def has_turns(self) -> bool:
        """Whether the recipe names an environment, so that samples may have several turns."""
        return self.env.get("name", SINGLE_TURN) != SINGLE_TURN

    @property
    def filter_admits(self) -> bool:
        """Whether `algorithm.filter` is applied during generation: a group that it empties is replaced."""
        return self.algorithm.filter.active and not self.async_.in_order

    @property
    def has_episodes(self) -> bool:
        """Whether a sample is an episode, which an error of an environment or a simulator may spoil."""
        return self.has_turns or self.robot is not None

    @property
    def validation_sampling(self) -> SamplingConfig:
        """The sampling of held-out responses: as in training, except for the keys of `validation.sampling`."""
        return self.validation.sampling.after(self.rollout.sampling)

    @property
    def rollout_dtype(self) -> str:
        """Precision in which responses are generated, fp32 or bf16: `rollout.dtype`, with `model` resolved."""
        return self.model.dtype if self.rollout.dtype == "model" else self.rollout.dtype

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the actor without its adapters: RL starts with fresh ones."""
        lora = self.model.lora
        return lora is not None and lora.path is None and self.reference.path is None and not self.sft.steps

    def parallel_of(self, role: str) -> ParallelConfig:
        """Return the layout of a role that holds a model: its own, else the actor's."""
        return getattr(self, role).parallel or self.actor.parallel

    def updates(self, role: ActorConfig | CriticConfig, resting: int = 0) -> int:
        """Return a role's optimizer steps in the whole run when it does not train in the first `resting` training
        steps.
        """
        return max(self.trainer.steps - resting, 1) * self._updates_per_step(role)

    def updates_after(self, step: int, role: ActorConfig | CriticConfig, resting: int = 0) -> int:
        """Return a role's optimizer steps in the training steps after `step`; `resting` as for `updates`."""
        return max(self.trainer.steps - max(step, resting), 0) * self._updates_per_step(role)

    def _updates_per_step(self, role: ActorConfig | CriticConfig) -> int:
        minis = self.data.batch_size // (role.mini_batch_size or self.data.batch_size)
        return role.ppo_epochs * max(1, minis)


def steps_of_epochs(epochs: float, samples: int, batch_size: int) -> int:
    """Return the number of steps in which so many passes over the samples fit.

    >>> steps_of_epochs(2, 10, 4)
    5
    """
    return max(1, math.ceil(epochs * samples / batch_size - 1e-9))


def steps_text(steps: int, size: int, samples: int, unit: str) -> str:
    """Describe a number of training steps as passes over the data.

    >>> steps_text(200, 32, 1882, "prompt")
    '200 steps of 32 = 3.4 epochs of 1,882 prompts'
    """
    return f"{steps:,} steps of {size:,} = {steps * size / samples:.3g} epochs of {samples:,} {unit}s"


def repeated_problem(key: str, size: int, samples: int) -> ConfigError | None:
    """Return the problem of a batch of `size` (configuration key `key`) that holds a sample twice: there are fewer
    samples; None if there are enough.
    """
    if size <= samples:
        return None
    return ConfigError(
        f"there are only {samples:,} different samples: every step holds some of them more than once",
        where=key,
        found=size,
        fix=f"add data, or set {key}={samples} or less",
    )
