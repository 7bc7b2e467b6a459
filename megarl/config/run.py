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
from megarl.config.models import FreeName, FurtherModelConfig
from megarl.config.placement import PlacementConfig
from megarl.config.policies import AgentPolicyConfig
from megarl.config.rollout import BRANCHING, SINGLE_TURN, AsyncConfig, RolloutConfig, SamplingConfig, ValidationConfig
from megarl.config.sync import SyncConfig
from megarl.config.task import Task, task_of
from megarl.config.training import (
    ActorConfig,
    CriticConfig,
    PreferenceConfig,
    ReferenceConfig,
    RewardModelConfig,
    SFTConfig,
    TeacherConfig,
    TrainingConfig,
)
from megarl.robots.config import RobotConfig
from megarl.system.errors import ConfigError


class EarlyStopConfig(Section):
    """Ends a run before `trainer.steps` when one metric is good enough or stops improving."""

    metric: str = Field(
        "val/acc",
        description="the watched metric; val/... is measured at each validation, other metrics at each step",
    )
    mode: Literal["max", "min"] = Field("max", description="max: larger is better; min: smaller is better")
    patience: PositiveInt | None = Field(
        None,
        description="number of measurements in a row without an improvement after which the run ends; null: no limit",
    )
    min_delta: NonNegativeFloat = Field(0.0, description="smallest change that counts as an improvement")
    target: float | None = Field(None, description="value of the metric at which the run ends; null: none")


class ProfileConfig(Section):
    """Records what the processor and the GPU do in a few steps."""

    steps: list[PositiveInt] = Field([3], min_length=1, max_length=1000, description="numbers of the steps to record")
    ranks: list[NonNegativeInt] = Field(
        [0], min_length=1, description="workers that record, by their number in the names of log files"
    )
    tool: Literal["torch", "nsys"] = Field(
        "torch",
        description="torch: write RUN_DIR/profile/step_N_rank_K.json.gz; nsys: mark the steps for `nsys profile "
        "--capture-range=cudaProfilerApi`, under which the run has been started",
    )


class TrainerConfig(Section):
    """The training loop: length, checkpoints, resuming."""

    steps: PositiveInt = Field(100, description="number of training steps")
    epochs: PositiveFloat | None = Field(
        None,
        description="passes over the training prompts, which set `steps` unless a later layer or override sets "
        "`steps`; the next pass fills the last batch; null: use steps",
    )
    seed: int = Field(0, description="seed of all random choices")
    save_every: NonNegativeInt = Field(0, description="training steps between checkpoints; 0: only one at the end")
    keep_last: PositiveInt = Field(2, description="number of recent checkpoints to keep in addition to the best")
    resume_every: NonNegativeInt = Field(
        0,
        description="training steps between checkpoints that serve only to resume, in addition to those of "
        "save_every; each is removed once a newer checkpoint is complete; 0: none",
    )
    save_by_s: Seconds | None = Field(
        None,
        description="latest end of the run, in seconds after the start of the job: the run saves and ends with exit "
        "code 0 when its longest step and save so far would exceed it; null: no limit",
    )
    best_metric: str | None = Field(
        "val/acc",
        description="metric whose best checkpoint is kept, larger is better; with save_every, a validation that "
        "improves it also saves a checkpoint; null: none",
    )
    early_stop: EarlyStopConfig | None = Field(
        None,
        description="end the run, as after its last step, when a metric is good enough or stops improving; null: never",
    )
    resume: Literal["auto", "never"] | str = Field(
        "auto",
        description="auto: continue from the newest intact checkpoint of this run folder; never: start from the "
        "beginning; or the folder of a checkpoint. Checkpoints of this run folder that are not continued move to "
        "checkpoints.old-K",
    )
    export_hf: bool = Field(True, description="write the final model in Hugging Face format")
    profile: ProfileConfig | None = Field(None, description="record kernels and operators of some steps; null: none")

    def steps_of(self, prompts: int, batch_size: int) -> int:
        """Return the number of training steps for `epochs` passes over `prompts` prompts."""
        assert self.epochs is not None, "the recipe must set trainer.epochs"
        return steps_of_epochs(self.epochs, prompts, batch_size)


class ClusterConfig(Section):
    """Processes, restarts and deadlines."""

    nproc: PositiveInt = Field(
        1, le=1_000_000, description="number of worker processes over all machines, one per device"
    )
    nnodes: PositiveInt = Field(1, le=1_000_000, description="number of machines")
    device_memory_gb: PositiveFloat | None = Field(
        None,
        le=100_000,
        description="memory of each GPU that the recipe is meant for, in GB: estimates are compared with it, and the "
        "run refuses to start without GPUs; null: the memory of this machine's GPUs",
    )
    threads: PositiveInt | None = Field(
        None, description="CPU threads per worker; null: cores divided by workers on this machine"
    )
    keep_freed_memory: bool = Field(
        True,
        description="let CPU workers keep freed memory for reuse (settings of glibc's malloc), which is faster",
    )
    timeout_s: Seconds = Field(600.0, description="deadline of every wait for another process")
    start_timeout_s: Seconds = Field(300.0, description="deadline for all workers to report that they started")
    grace_s: NonNegativeFloat = Field(
        20.0,
        le=31_536_000,
        description="seconds to finish the step and save after SIGTERM or SIGHUP. Slurm and Kubernetes send SIGKILL "
        "after 30 s, systemd after 90 s",
    )
    max_restarts: NonNegativeInt = Field(
        0,
        description="restarts from the newest checkpoint after a worker was lost; a newer checkpoint resets the "
        "count. The default with several teams or `placement.auto` is 3",
    )


class TrackingConfig(Section):
    """Where metrics are written."""

    dir: str = Field("runs", description="folder that holds the run folders")
    console: Literal["auto", "plain", "quiet", "json"] = Field(
        "auto",
        description="auto: a line per step, with a progress bar on a terminal; plain: no bar; quiet: only validations "
        "and the final table; json: one JSON object per step on standard output, all other lines on standard error",
    )
    mlflow: bool = Field(True, description="log metrics to MLflow")
    mlflow_uri: str | None = Field(None, description="MLflow tracking URI; null: sqlite:///<dir>/mlflow.db")
    loggers: list[str] = Field(
        [],
        description="trackers in addition to MLflow: wandb, tensorboard, trackio, or classes of yours as file.py:Class",
    )
    project: str = Field(
        "megarl", min_length=1, description="project name in W&B and trackio, experiment name in MLflow"
    )
    report: bool = Field(True, description="write report.html at the end of the run")
    training_groups: int = Field(
        2,
        ge=0,
        le=1000,
        description="training groups kept for the report at the first step, every `validation.every`-th, and the last",
    )
    peak_tflops: PositiveFloat | None = Field(
        None,
        le=1_000_000_000,
        description="peak TFLOP/s per device for MFU; null: the known value of the device; on a CPU it is measured",
    )

    @property
    def messages(self) -> TextIO | None:
        """File for all output but step records: standard error with console=json, else None (standard output)."""
        return sys.stderr if self.console == "json" else None


def _shown(name: str) -> str:
    """Refuse a name with control characters, which scripts, terminals and folders would show differently."""
    if not name.isprintable():
        raise ValueError("the name must be one line of text without control characters")
    return name


class Written(frozenset[str]):
    """Dotted keys that a recipe file or the user set. Any two compare as equal, so recipes compare by their values."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Written)

    __hash__ = frozenset.__hash__


class RunConfig(Section):
    """One recipe file, resolved."""

    model_config = ConfigDict(serialize_by_alias=True)  # `async` is a Python keyword

    name: Annotated[str, AfterValidator(_shown)] = Field(
        description="run name, also the name of its folder in tracking.dir"
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="the policy")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="the RL objective")
    data: DataConfig = Field(default_factory=DataConfig, description="where prompts come from")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="how responses are scored")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="how responses are generated")
    env: dict[str, Any] = Field(
        default_factory=lambda: {"name": SINGLE_TURN, "on_error": "fail"},
        description="environment: `name` (single_turn, tools, agent, gymnasium, openenv, verifiers, file.py:Class, "
        "pkg.mod:Class), `on_error` (fail: end the run; mark: leave the episode out and count it), and the "
        "environment's own keys",
    )
    robot: RobotConfig | None = Field(
        None, description="settings of a policy that acts in a simulator; null: the policy is a language model"
    )
    sync: SyncConfig = Field(default_factory=SyncConfig, description="how weights reach the generation servers")
    rollout_correction: RolloutCorrectionConfig = Field(
        default_factory=RolloutCorrectionConfig, description="correction of the gap between generation and training"
    )
    validation: ValidationConfig = Field(default_factory=ValidationConfig, description="evaluation on held-out prompts")
    actor: ActorConfig = Field(default_factory=ActorConfig, description="training of the policy")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="the value model of PPO")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="the frozen reference policy")
    teacher: TeacherConfig = Field(default_factory=TeacherConfig, description="the frozen teacher of distillation")
    reward_model: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="the model that computes the reward `reward_model`"
    )
    models: dict[FreeName, FurtherModelConfig] = Field(
        default_factory=dict,
        description="further models by name, for stages of a pipeline of yours that take them as arguments",
    )
    policies: dict[FreeName, AgentPolicyConfig] = Field(
        default_factory=dict,
        description="several policies that play an episode together, by the names by which an agent calls them; empty: "
        "one policy",
    )
    sft: SFTConfig = Field(default_factory=SFTConfig, description="supervised fine-tuning, by itself or before RL")
    preference: PreferenceConfig | None = Field(
        None,
        description="training on better and worse responses from data (pipelines dpo, kto, reward_model); null: "
        "responses are generated",
    )
    trainer: TrainerConfig = Field(
        default_factory=TrainerConfig, description="the training loop: length, checkpoints, resuming"
    )
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="processes, restarts and deadlines")
    placement: PlacementConfig = Field(
        default_factory=PlacementConfig, description="which roles have devices of their own"
    )
    async_: AsyncConfig = Field(
        default_factory=AsyncConfig, alias="async", description="generation that runs ahead of training"
    )
    launch: LaunchConfig = Field(
        default_factory=LaunchConfig, description="how the run is started, locally or on a cluster"
    )
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="where metrics are written")
    _written: Written = PrivateAttr(default_factory=Written)
    _given: Written = PrivateAttr(default_factory=Written)
    _uncounted: Written = PrivateAttr(default_factory=Written)

    @property
    def written(self) -> Written:
        """The keys that the user's own recipe file and overrides set, not those of parent recipes."""
        return self._written

    @property
    def given(self) -> Written:
        """The keys set by any recipe file, parent recipe or override; empty when no file was read."""
        return self._given

    def with_written(self, keys: Iterable[str], given: Iterable[str]) -> RunConfig:
        """Return a copy with `keys` as the keys that the user wrote and `given` as the keys that any layer sets."""
        copy = self.model_copy()
        copy._written, copy._given = Written(keys), Written(given)
        return copy

    @property
    def uncounted(self) -> Written:
        """The sections (`trainer`, `sft`) whose `steps` are unknown, since their epochs are counted at the start."""
        return self._uncounted

    def with_uncounted(self, sections: Iterable[str]) -> RunConfig:
        """Return a copy whose `steps` of `sections` are unknown."""
        copy = self.model_copy()
        copy._uncounted = Written(sections)
        return copy

    def longest_sequence(self) -> int:
        """Return the largest number of tokens of a prompt plus generated response, including held-out prompts."""
        sampled = [self.rollout.sampling, *([self.validation_sampling] if self.data.held_out else [])]
        return self.data.max_prompt_tokens + max(self.response_tokens(sampling) for sampling in sampled)

    def response_tokens(self, sampling: SamplingConfig) -> int:
        """Return the largest number of tokens of a response: of one turn, or with an environment of all turns and
        observations.
        """
        return self.rollout.limits.response_tokens(sampling) if self.has_turns else sampling.max_new_tokens

    @property
    def whole_conversations(self) -> bool:
        """Whether the prompt column also holds the responses to train on."""
        return self.data.prompt_key == self.sft.response_key

    @property
    def data_unit(self) -> str:
        """The name of one unit of `data.batch_size`: prompt, pair or example."""
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
    def round_prompts(self) -> int:
        """The number of prompt groups that a round of generation has to complete."""
        return self.rollout.round_prompts or self.data.batch_size

    @property
    def policy_rewards(self) -> dict[str, RewardConfig]:
        """A `reward` section for each policy that has a reward function of its own, by the policy's name."""
        sections = {name: policy.reward for name, policy in self.policies.items() if policy.reward is not None}
        return {name: self.reward.with_function(part.name, part.kwargs, part.mode) for name, part in sections.items()}

    @property
    def has_lanes(self) -> bool:
        """Whether an episode may have several sequences, each a row of a batch."""
        return self.env.get("name") in BRANCHING or bool(self.policies)

    @property
    def has_shares(self) -> bool:
        """Whether the sequences of an episode may have different shares of its advantage."""
        return self.env.get("name") in BRANCHING and self.env.get("credit", "each") not in ("each", "last")

    @property
    def filter_admits(self) -> bool:
        """Whether `algorithm.filter` is applied during generation, so that a group that it empties is replaced."""
        return self.algorithm.filter.active and not self.async_.in_order

    @property
    def task(self) -> Task:
        """The policy's task: writing text, or the task whose section the recipe has."""
        return task_of(self)

    @property
    def has_episodes(self) -> bool:
        """Whether samples are episodes, which an error of an environment or a simulator may spoil."""
        return self.has_turns or not self.task.writes_text

    @property
    def validation_sampling(self) -> SamplingConfig:
        """The sampling of held-out responses: as in training, except for the keys of `validation.sampling`."""
        return self.validation.sampling.after(self.rollout.sampling)

    @property
    def sends_shards(self) -> bool:
        """Whether servers get weights from shard to shard: with `sync.transport: shards`, and with `auto` if servers on
        the trainer's GPUs run on several machines each."""
        servers, wanted = self.rollout.servers, self.sync.transport
        if servers is None:
            return False
        return wanted == "shards" or (wanted == "auto" and servers.colocated and servers.nnodes > 1)

    @property
    def rollout_dtype(self) -> str:
        """Precision in which responses are generated, fp32, bf16 or fp16: `rollout.dtype`, where `model` stands for
        the model's precision.
        """
        return self.model.dtype if self.rollout.dtype == "model" else self.rollout.dtype

    @property
    def cache_dtype(self) -> str:
        """Precision of the KV cache during generation: `fp8` if `rollout.sglang.kv_cache_dtype` sets one, else
        `rollout_dtype`."""
        servers = self.rollout.servers
        return "fp8" if servers is not None and servers.kv_cache_dtype != "auto" else self.rollout_dtype

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference policy is the actor without its adapters, because RL starts with new adapters."""
        lora = self.model.lora
        return lora is not None and lora.path is None and self.reference.path is None and not self.sft.steps

    def parallel_of(self, role: str) -> ParallelConfig:
        """Return the layout of a role that holds a model: the role's own if set, else the actor's."""
        section = self.models[role] if role in self.models else getattr(self, role)
        return section.parallel or self.actor.parallel

    def training_of(self, role: str) -> TrainingConfig:
        """Return the settings with which the model of a role is trained; for frozen models of built-in roles, the
        actor's."""
        return self.critic if role == "critic" else self.models.get(role, self.actor)

    def section_of(self, role: str) -> str:
        """Return the recipe key of a role's section."""
        return f"models.{role}" if role in self.models else role

    def updates(self, role: TrainingConfig, resting: int = 0) -> int:
        """Return how many optimizer steps `role` takes in the run if it skips the first `resting` training steps; at
        least those of one training step."""
        return max(self.trainer.steps - resting, 1) * self._updates_per_step(role)

    def updates_after(self, step: int, role: TrainingConfig, resting: int = 0) -> int:
        """Return how many optimizer steps `role` still has to take when training step `step` is done. It takes none in
        the first `resting` training steps.
        """
        return max(self.trainer.steps - max(step, resting), 0) * self._updates_per_step(role)

    def _updates_per_step(self, role: TrainingConfig) -> int:
        minis = self.data.batch_size // (role.mini_batch_size or self.data.batch_size)
        return role.ppo_epochs * max(1, minis)


def steps_of_epochs(epochs: float, samples: int, batch_size: int) -> int:
    """Return the number of steps that `epochs` passes over `samples` samples take, rounded up.

    >>> steps_of_epochs(2, 10, 4)
    5
    """
    return max(1, math.ceil(epochs * samples / batch_size - 1e-9))


def steps_text(steps: int, size: int, samples: int, unit: str) -> str:
    """Describe a number of training steps as passes over the data.

    >>> steps_text(200, 32, 1882, "prompt")
    '200 steps of 32 = 3.4 epochs of 1,882 prompts'
    >>> steps_text(1, 64, 4, "pair")
    '1 step of 64 = 16 epochs of 4 pairs'
    >>> steps_text(200, 64, 4, "prompt")
    '200 steps of 64 = 3,200 epochs of 4 prompts'
    """
    epochs = steps * size / samples
    passes = f"{epochs:.3g}" if epochs < 999.5 else f"{epochs:,.0f}"
    length = f"{steps:,} step{'s' * (steps != 1)} of {size:,}"
    return f"{length} = {passes} epoch{'s' * (passes != '1')} of {samples:,} {unit}{'s' * (samples != 1)}"


def repeated_problem(key: str, size: int, samples: int) -> ConfigError | None:
    """Return the error for a batch that is larger than the number of samples and so repeats some; None if it is not.
    `size` is the batch size and `key` its configuration key.
    """
    if size <= samples:
        return None
    return ConfigError(
        f"the data have only {samples:,} different samples, so every step would repeat some of them",
        where=key,
        found=size,
        fix=f"add data, or set {key}={samples} or less",
    )
