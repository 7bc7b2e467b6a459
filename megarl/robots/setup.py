"""Builds everything that plays robots' episodes in a run with the section `robot`.

simulators (processes)  --> View --> Player <-- SamplingPolicy <-- the actor's own parameters
                                       |
                                    episodes --> samples
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.artifacts.action_statistics import (
    FILE,
    ActionStatistics,
    DatasetStatistics,
    choose_statistics,
    statistics_text,
)
from megarl.config.components import settings_at
from megarl.models.hf import vision_of
from megarl.models.weights.files import resolve_folder
from megarl.robots.config import robot_of
from megarl.robots.data.demonstration_sources import find_demonstrations
from megarl.robots.data.pictures import PIPELINES, policy_normalisation
from megarl.robots.envs import SimulatorPool, SimulatorSettings
from megarl.robots.films import film_rows
from megarl.robots.models.vla.actions import ActionCodec, ActionTokens, gripper_rule
from megarl.robots.models.vla.calls import PolicyFamily, policy_family, prompt_ids
from megarl.robots.models.vla.cloning import cloning_statistics
from megarl.robots.models.vla.sequences import VLALayout
from megarl.robots.rollout.play import PlayCounts, Player
from megarl.robots.rollout.policy import SamplingPolicy
from megarl.robots.rollout.trials import Trials, limited, part_trials, val_sets
from megarl.robots.rollout.view import View
from megarl.robots.scores import EpisodeScores
from megarl.robots.simulators.wire import plain_spec, spec_of
from megarl.robots.statistics import no_statistics, policy_statistics, refuse_other_state
from megarl.system.device import device, has_cuda
from megarl.system.errors import ConfigError, choose
from megarl.system.tracing import keep_beating, phase

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.architectures.vision import VisionShape
    from megarl.config.rollout import SamplingConfig
    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch
    from megarl.data.loader import PromptLoader
    from megarl.data.render import Split
    from megarl.robots.config import RobotConfig
    from megarl.robots.simulators.protocol import TaskSpec
    from megarl.runtime.context import StepContext
    from megarl.runtime.rank_state import RankState
    from megarl.runtime.roles import RolloutRole
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout


#: File of a checkpoint with the bounds of the action statistics.
BOUNDS = "action_bounds.json"


@dataclass(frozen=True)
class Body:
    """How the recipe's policy sees and acts, in any simulator."""

    codec: ActionCodec
    family: PolicyFamily
    view: View
    sequences: VLALayout


def vla_layout(config: RunConfig, hf: PretrainedConfig) -> VLALayout:
    """Return the layout of policy calls as sequences of the model."""
    robot, shape = robot_of(config), vision_of(hf)
    if shape is None:
        raise ConfigError(
            "the recipe has a section `robot`, but the model has no vision part",
            where="model",
            allowed="a model of model_type openvla",
            fix="set model.path to a robot policy, or remove the section `robot`",
        )
    columns = _tokens(hf).columns(hf.vocab_size)
    return VLALayout(
        shape,
        policy_family(robot.family, "robot.family"),
        policy_normalisation(getattr(hf, "preprocessor", None), len(shape.towers), shape.towers[0].image),
        tuple(robot.cameras),
        robot.dim,
        robot.chunk,
        (columns.start, columns.stop),
        robot.block_only,
    )


def body_of(config: RunConfig, sequences: VLALayout, hf: PretrainedConfig, data: DatasetStatistics) -> Body:
    """Return the policy's `Body`, with the layout `sequences` of its calls and the statistics `data` of its actions."""
    robot = robot_of(config)
    codec = ActionCodec(_tokens(hf), data.action, gripper_rule(robot.gripper, "robot.gripper"))
    _refuse_other_sizes(robot, codec, sequences.shape, data)
    pipeline = choose(PIPELINES, robot.pictures, "unknown image preparation", where="robot.pictures")
    view = View(tuple(robot.cameras), replace(pipeline, size=sequences.shape.towers[0].image), data.state)
    return Body(codec, sequences.family, view, sequences)


def _tokens(hf: PretrainedConfig) -> ActionTokens:
    return ActionTokens.of_checkpoint(hf.policy, "the model's config.json")


def _statistics(config: RunConfig, layout: Layout, tasks: Mapping[str, TaskSpec]) -> tuple[str, DatasetStatistics]:
    """Return the name and the statistics of the data set that scales the policy's actions.

    Collective over a team with `robot.statistics=demonstrations`, which one rank reads.
    """
    robot = robot_of(config)
    if robot.statistics == "model":
        return model_statistics(config, robot)
    with phase("statistics"), keep_beating():
        told = layout.world.broadcast_json(_of_demonstrations(config, robot, tasks) if layout.rank == 0 else None)
    return _own_name(robot), DatasetStatistics.from_json(told, "demonstrations", robot.bounds)


def model_statistics(config: RunConfig, robot: RobotConfig) -> tuple[str, DatasetStatistics]:
    """Return the name and the statistics in the model's folder; a new model's statistics scale nothing."""
    found = None if config.model.path is None else policy_statistics(resolve_folder(config.model.path), robot.bounds)
    if found is not None:
        known, where = found
        chosen = choose_statistics(known, robot.unnorm_key, where)
        return next(name for name, entry in known.items() if entry is chosen), chosen
    if config.model.path is not None or robot.unnorm_key is not None:
        raise no_statistics(config.model.path)
    return _own_name(robot), DatasetStatistics(ActionStatistics.plain(robot.dim))


def _own_name(robot: RobotConfig) -> str:
    return str(robot.simulator.get("name"))


def statistics_file(hf: PretrainedConfig, layout: Layout) -> dict[str, bytes]:
    """Return the checkpoint files with the action statistics, by name; empty on all ranks of a team but its first."""
    known = getattr(hf, "action_statistics", None)
    return (
        {FILE: statistics_text(known).encode(), BOUNDS: _bounds(known).encode()} if known and layout.rank == 0 else {}
    )


def _bounds(known: Mapping[str, DatasetStatistics]) -> str:
    """Return as JSON which statistics are mapped to -1 and 1; dataset_statistics.json does not contain this."""
    return json.dumps({name: entry.action.bounds for name, entry in known.items()})


def check_same_statistics(hf: PretrainedConfig, folder: Path) -> None:
    """Check that a checkpoint has the action statistics of this run; older checkpoints have none, and pass."""
    known = getattr(hf, "action_statistics", None)
    if not known:
        return
    for name, mine, key in ((FILE, statistics_text(known), "statistics"), (BOUNDS, _bounds(known), "bounds")):
        file = folder / name
        if file.is_file() and file.read_text(encoding="utf-8") != mine:
            raise ConfigError(
                "the checkpoint's policy was trained with other action statistics",
                where=f"robot.{key}",
                found="other statistics in this run",
                allowed=f"the statistics in {file}",
                fix=f"restore the earlier robot.{key}, model or demonstrations, or start with trainer.resume=never",
            )


def _of_demonstrations(config: RunConfig, robot: RobotConfig, tasks: Mapping[str, TaskSpec]) -> dict[str, Any]:
    shown = find_demonstrations(config.sft.train_files or [], tasks, robot.recorded_cameras)
    return cloning_statistics(shown, gripper_rule(robot.gripper, "robot.gripper"), robot.bounds).to_json()


def _refuse_other_sizes(robot: RobotConfig, codec: ActionCodec, shape: VisionShape, data: DatasetStatistics) -> None:
    if codec.dim != robot.dim:
        raise ConfigError(
            "the action statistics have another number of action values",
            where="robot.dim",
            found=robot.dim,
            allowed=str(codec.dim),
            fix=f"set robot.dim={codec.dim}, or choose other statistics (robot.unnorm_key)",
        )
    refuse_other_state(data, shape.state)


@dataclass
class Robots:
    """The simulators of one rank, and the player and policy that use them; implements `TaskPlayer`."""

    pool: SimulatorPool | None  # simulators; only on the first rank of a replica
    tasks: Mapping[str, TaskSpec]  # what is played, on every rank
    body: Body
    trials: Mapping[Split, Trials]  # start states, by split
    prompt_ids: Callable[[str], list[int]]
    player: Player | None = None  # plays; None until there is a policy
    policy: SamplingPolicy | None = None  # acts; None as well
    counts: PlayCounts = field(default_factory=PlayCounts)  # what was played last

    def take_policy(self, engine: MegatronEngine, config: RunConfig, layout: Layout) -> None:
        """Use the weights of `engine` for all further episodes. Collective over a replica."""
        body, robot = self.body, robot_of(config)
        self.policy = SamplingPolicy(
            engine.sample, body.codec, robot.cameras, robot.chunk, parallel=body.family.parallel
        )
        self.player = Player(
            self.pool,
            self.policy,
            layout.mp_group,
            body.view,
            self.prompt_ids,
            halves=robot.halves,
            on_error=robot.on_error,
        )

    def rows(self, split: Split) -> Trials:
        """Return the start states of a split."""
        return self.trials[split]

    def generate(
        self,
        c: StepContext,
        rollout: RolloutRole,
        prompts: Batch,
        sampling: SamplingConfig,
        advance: Callable[[int], None],
        *,
        scored: bool,
    ) -> Batch:
        """Play `sampling.n` episodes from each of B start states; `scored`: record the clips that scores need."""
        from megarl.robots.samples import play_robots

        record = c.scores.recording if scored and isinstance(c.scores, EpisodeScores) else None
        return play_robots(c, self, rollout, prompts, sampling, advance, record)

    def record(self, c: StepContext, samples: Batch) -> None:
        """Record the metrics `env/...` of the episodes that the last `generate` returned."""
        from megarl.robots.samples import record_robots

        record_robots(c, samples, self.counts)

    def report_rows(self, run_dir: Path, step: int, samples: Batch, count: int) -> list[dict[str, Any]]:
        """Write films of the first `count` episodes, and return their rows for the report."""
        return film_rows(run_dir, step, samples, count)

    def load_examples(self, c: RankState) -> PromptLoader:
        """Return the loader of policy calls from demonstrations. Collective over the ranks of a team."""
        from megarl.robots.cold_start import load_calls

        return load_calls(c, self)

    def close(self) -> None:
        """End the simulators."""
        if self.pool is not None:
            self.pool.close()


def open_robots(
    config: RunConfig, hf: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, layout: Layout
) -> Robots | None:
    """Start the recipe's simulators, and choose start states for training and validation; None without `robot`."""
    robot = config.robot
    if robot is None:
        return None
    sequences, pool = vla_layout(config, hf), None  # checks the model before simulators start, which takes long
    if layout.is_lead:
        settings = settings_at("robot.simulator", robot.simulator, SimulatorSettings)
        cuda = device().index if has_cuda() else None
        pool = SimulatorPool(settings, where="robot.simulator", cuda_device=cuda)
    told = None if pool is None else [plain_spec(task) for task in pool.tasks.values()]
    tasks = {spec.name: spec for spec in map(spec_of, layout.mp_group.broadcast_json(told))}
    for task in tasks.values():
        _refuse_other_task(robot, sequences.shape, task)
    name, data = _statistics(config, layout, tasks)
    hf.action_statistics = {name: data}  # exports of the model contain them
    body = body_of(config, sequences, hf, data)
    split_handovers = part_trials(
        tasks.values(),
        seed=config.trainer.seed,
        held_out=robot.held_out,
        trained=robot.trials,
        val_trained=robot.val_trained,
        val_evaluation=robot.val_evaluation,
    )
    sets = val_sets(tasks.values(), split_handovers)
    split_handovers["val"] = limited(split_handovers["val"], config.data.max_val_samples, sets)
    tokens_of = partial(prompt_ids, family=body.family, tokenizer=tokenizer)
    prompts = {name: tokens_of(task.instruction) for name, task in tasks.items()}
    texts = {name: task.instruction for name, task in tasks.items()}
    trials: dict[Split, Trials] = {
        split: Trials(split, pairs, prompts, texts, sets if split == "val" else {})
        for split, pairs in split_handovers.items()
    }
    return Robots(pool, tasks, body, trials, tokens_of)


def _refuse_other_task(robot: RobotConfig, shape: VisionShape, task: TaskSpec) -> None:
    if task.action_dim != robot.dim:
        raise ConfigError(
            f"actions of {task.name} have another number of values",
            where="robot.dim",
            found=robot.dim,
            allowed=str(task.action_dim),
            fix=f"set robot.dim={task.action_dim}",
        )
    if shape.state and task.state_dim != shape.state:
        raise ConfigError(
            f"the model needs a robot state of another size than {task.name} has",
            where="model: proprio_dim or state_dim",
            found=shape.state,
            allowed=str(task.state_dim),
            fix="use a policy of this robot, or set state_dim of a new policy (0: pictures only)",
        )
