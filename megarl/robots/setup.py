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

import torch

from megarl.artifacts.action_statistics import (
    FILE,
    ActionStatistics,
    DatasetStatistics,
    statistics_text,
)
from megarl.config.components import settings_at
from megarl.data.batch import Batch, Jagged
from megarl.models.hf import vision_of
from megarl.models.weights.files import resolve_folder
from megarl.robots.config import refuse_other_tasks, robot_of
from megarl.robots.data.demonstration_sources import find_demonstrations
from megarl.robots.data.pictures import PIPELINES, policy_normalisation
from megarl.robots.envs import Pool, SimulatorSettings, open_pool
from megarl.robots.films import film_rows
from megarl.robots.models.flow.process import Denoising
from megarl.robots.models.flow.sequences import FlowLayout
from megarl.robots.models.vla.actions import GRIPPER_RULES, ActionCodec, ActionTokens, NumberCodec
from megarl.robots.models.vla.calls import FAMILIES, PolicyFamily, prompt_ids
from megarl.robots.models.vla.cloning import cloning_statistics
from megarl.robots.models.vla.sequences import VLALayout
from megarl.robots.rollout.cached import CachedSampling
from megarl.robots.rollout.denoising import DenoisingPolicy
from megarl.robots.rollout.episode import episode_values
from megarl.robots.rollout.play import EpisodeStart, PlayCounts, Player, View
from megarl.robots.rollout.policy import SamplingPolicy
from megarl.robots.rollout.trials import Trials, limited, part_trials, val_sets
from megarl.robots.scores import EpisodeScores
from megarl.robots.simulators.wire import plain_spec, spec_of
from megarl.robots.statistics import (
    chosen_statistics,
    no_statistics,
    refuse_other_dim,
    refuse_other_family,
    refuse_other_state,
    state_numbers,
)
from megarl.system.device import device, has_cuda
from megarl.system.errors import ConfigError
from megarl.system.tracing import keep_beating, phase

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.architectures.vision import VisionShape
    from megarl.config.rollout import SamplingConfig
    from megarl.config.run import RunConfig
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
    """How the recipe's policy observes and acts, whatever the simulator."""

    codec: ActionCodec | NumberCodec
    family: PolicyFamily
    view: View
    sequences: VLALayout | FlowLayout


def vla_layout(config: RunConfig, hf: PretrainedConfig) -> VLALayout | FlowLayout:
    """Return the layout of policy calls as sequences of the model."""
    robot, shape = robot_of(config), vision_of(hf)
    if shape is None:
        raise ConfigError(
            "the recipe has a section `robot`, but the model has no vision part",
            where="model",
            allowed="a model of model_type openvla",
            fix="set model.path to a robot policy, or remove the section `robot`",
        )
    refuse_other_family(robot, shape)
    normalise = policy_normalisation(getattr(hf, "preprocessor", None), len(shape.towers), shape.towers[0].image)
    if shape.expert is not None:
        process = Denoising(robot.flow.steps, robot.flow.noise)
        return FlowLayout(shape, shape.expert, normalise, tuple(robot.cameras), robot.chunk, process)
    columns = _tokens(hf).columns(hf.vocab_size)
    return VLALayout(
        shape,
        FAMILIES[robot.family],
        normalise,
        tuple(robot.cameras),
        robot.dim,
        robot.chunk,
        (columns.start, columns.stop),
        robot.block_only,
    )


def body_of(
    config: RunConfig, sequences: VLALayout | FlowLayout, hf: PretrainedConfig, data: DatasetStatistics
) -> Body:
    """Return the policy's `Body`, which encodes observations and decodes actions.

    Args:
        sequences: layout of the tokens of a policy call.
        data: statistics of the actions and states that the policy was trained on.
    """
    robot = robot_of(config)
    refuse_other_dim(data, robot.dim)
    refuse_other_state(data, state_numbers(sequences.shape))
    gripper, flow = GRIPPER_RULES[robot.gripper], isinstance(sequences, FlowLayout)
    codec = NumberCodec(data.action, gripper) if flow else ActionCodec(_tokens(hf), data.action, gripper)
    pipeline = replace(PIPELINES[robot.pictures], size=sequences.shape.towers[0].image)
    view = View(tuple(robot.cameras), pipeline, data.state)
    return Body(codec, FAMILIES[robot.family], view, sequences)


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
        content = None
        if layout.rank == 0:
            demonstrations = find_demonstrations(config.sft.train_files or [], tasks, robot.recorded_cameras)
            content = cloning_statistics(demonstrations, GRIPPER_RULES[robot.gripper], robot.bounds).to_json()
        content = layout.world.broadcast_json(content)
    return str(robot.simulator.get("name")), DatasetStatistics.from_json(content, "demonstrations", robot.bounds)


def model_statistics(config: RunConfig, robot: RobotConfig) -> tuple[str, DatasetStatistics]:
    """Return the name of a data set and its action statistics from the model's folder. A randomly initialised model
    gets statistics that change no number, under the simulator's name."""
    path = config.model.path
    if path is not None:
        return chosen_statistics(resolve_folder(path), robot, path)
    if robot.unnorm_key is not None:
        raise no_statistics(path)
    return str(robot.simulator.get("name")), DatasetStatistics(ActionStatistics.plain(robot.dim))


def statistics_file(hf: PretrainedConfig, layout: Layout) -> dict[str, bytes]:
    """Return the checkpoint files with the action statistics, by name; empty except on a team's first rank."""
    return {name: text.encode() for name, text in _statistics_texts(hf).items()} if layout.rank == 0 else {}


def _statistics_texts(hf: PretrainedConfig) -> dict[str, str]:
    """Return the content of the files with the policy's action statistics, by name; empty if it has none.

    The file `BOUNDS` records which statistics of each data set are mapped to -1 and 1 (such as q01 and q99), because
    dataset_statistics.json has no field for this.
    """
    known = getattr(hf, "action_statistics", None)
    if not known:
        return {}
    return {
        FILE: statistics_text(known),
        BOUNDS: json.dumps({name: data.action.bounds for name, data in known.items()}),
    }


def check_same_statistics(hf: PretrainedConfig, folder: Path) -> None:
    """Check that a checkpoint has the action statistics of this run; older checkpoints have none, and pass."""
    for name, text in _statistics_texts(hf).items():
        file, key = folder / name, "statistics" if name == FILE else "bounds"
        if file.is_file() and file.read_text(encoding="utf-8") != text:
            raise ConfigError(
                "the checkpoint's policy was trained with different action statistics",
                where=f"robot.{key}",
                found="other statistics in this run",
                allowed=f"the statistics in {file}",
                fix=f"restore the earlier robot.{key}, robot.unnorm_key, model or demonstrations, or start with "
                "trainer.resume=never",
            )


@dataclass
class Robots:
    """The simulators of one rank, and the player and policy that use them; implements `TaskPlayer`."""

    pool: Pool | None  # simulators; only on the first rank of a replica
    tasks: Mapping[str, TaskSpec]  # tasks that are played; on every rank
    body: Body
    trials: Mapping[Split, Trials]  # start states, by split
    prompt_ids: Callable[[str], list[int]]
    player: Player | None = None  # plays episodes; None until there is a policy
    policy: SamplingPolicy | DenoisingPolicy | None = None  # samples actions; None until there is a policy
    counts: PlayCounts = field(default_factory=PlayCounts)  # counts of the last call of `play`

    def take_policy(self, engine: MegatronEngine, config: RunConfig, layout: Layout) -> None:
        """Use the weights of `engine` for all further episodes. Collective over a replica."""
        body, robot = self.body, robot_of(config)
        if isinstance(body.codec, NumberCodec):
            process = Denoising(robot.flow.steps, robot.flow.noise)
            self.policy = DenoisingPolicy(engine.evaluate, body.codec, process, robot.cameras, robot.chunk)
        else:
            assert isinstance(body.sequences, VLALayout), "the layout of action tokens"
            sample = engine.sample if body.family.parallel else CachedSampling(engine, body.sequences)
            self.policy = SamplingPolicy(sample, body.codec, robot.cameras, robot.chunk)
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
        """Play `sampling.n` episodes for each of B start states; return B * `sampling.n` samples with EPISODE_FIELDS.

        Args:
            advance: is called with the number of newly finished episodes.
            scored: the simulators record the clips that scores need.
        """
        assert self.player is not None, "`take_policy` comes first"
        assert self.policy is not None, "with the player"
        self.policy.temperature = sampling.temperature
        starts = [
            EpisodeStart(f"{uid}#{i}", row["task"], row["trial"], ids.tolist(), partial(c.seeds.sample, uid, i))
            for ids, uid, row in zip(prompts["prompt_ids"].unbind(), prompts["uid"], prompts["row"], strict=True)
            for i in range(sampling.n)
        ]
        record = c.scores.recording if scored and isinstance(c.scores, EpisodeScores) else None
        episodes, self.counts = self.player.play(starts, advance, record)
        values, samples = episode_values(episodes, rollout.engine.weight_version), prompts.repeat(sampling.n)
        ends, texts = values["turn_ends"], zip(episodes, samples["prompt_text"], strict=True)
        rewards = ends.values.new_zeros(len(ends.values)).float()
        rewards[ends.offsets[1:] - 1] = values["success"].float()
        values |= {
            "prompt_ids": Jagged.from_list([episode.prompt_ids for episode in episodes], dtype=torch.int64),
            "prompt_text": [episode.instruction or text for episode, text in texts],
            "sample_id": [start.sample_id for start in starts],
            "response_text": [episode.describe() for episode in episodes],
            "finish_reason": [episode.finish_reason for episode in episodes],
            "turn_rewards": Jagged(rewards, ends.offsets),
        }
        return samples.with_values(values)

    def record(self, c: StepContext, samples: Batch) -> None:
        """Record the metrics `env/...` of the episodes that the last `generate` returned.

        Episodes whose simulator failed only count as errors.
        """
        m, counts = c.metrics, self.counts
        m.sum("env/errors", sum(counts.failures.values()))
        for kind, number in counts.failures.items():
            m.sum(f"env/errors/{kind}", number)
        m.sum("env/steps/total", counts.steps)
        m.sum("env/calls/total", counts.calls)
        m.max("timing_s/act", counts.act_s)
        m.max("timing_s/wait_for_simulators", counts.wait_s)
        m.mean("perf/wait_for_simulators", counts.wait_s, max(counts.wait_s + counts.act_s, 1e-9))
        played = samples.select([place for place, error in enumerate(samples["env_error"]) if not error])
        if not len(played):
            return
        m.mean("env/success", float(played["success"].sum()), len(played))
        m.mean("env/steps/mean", float(played["finish_step"].sum()), len(played))
        m.mean("env/calls/mean", float(played["turn_ends"].lengths.sum()), len(played))
        m.max("env/calls/max", float(played["turn_ends"].lengths.max()))

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
    sequences, pool = vla_layout(config, hf), None  # checks the model first, because simulators start slowly
    if layout.is_lead:
        settings = settings_at("robot.simulator", robot.simulator, SimulatorSettings)
        cuda = device().index if has_cuda() else None
        pool = open_pool(settings, where="robot.simulator", cuda_device=cuda)
    specs = None if pool is None else [plain_spec(task) for task in pool.tasks.values()]
    tasks = {spec.name: spec for spec in map(spec_of, layout.mp_group.broadcast_json(specs))}
    for task in tasks.values():
        _refuse_other_task(robot, sequences.shape, task)
    name, data = _statistics(config, layout, tasks)
    hf.action_statistics = {name: data}  # exports of the model contain them
    body = body_of(config, sequences, hf, data)
    states = _split_trials(config, robot, tasks)
    sources = {name: task.source for name, task in tasks.items() if task.source}
    sets = val_sets(tasks.values(), states, robot.held_out_tasks)
    states["val"] = limited(states["val"], config.data.max_val_samples, sets, sources)
    tokens_of = partial(prompt_ids, family=body.family, tokenizer=tokenizer)
    prompts = {name: tokens_of(task.instruction) for name, task in tasks.items()}
    texts = {name: task.instruction for name, task in tasks.items()}
    trials: dict[Split, Trials] = {
        split: Trials(split, pairs, prompts, texts, sets if split == "val" else {}, sources)
        for split, pairs in states.items()
    }
    return Robots(pool, tasks, body, trials, tokens_of)


def count_start_states(config: RunConfig) -> int:
    """Return the number of start states for training. A process of the simulator is started to list the tasks, and
    ended again; it constructs no task."""
    settings = settings_at("robot.simulator", robot_of(config).simulator, SimulatorSettings)
    alone = settings.model_copy(update={"workers": 1})
    with open_pool(alone, where="robot.simulator") as pool:
        return len(_split_trials(config, robot_of(config), pool.tasks)["train"])


def _split_trials(
    config: RunConfig, robot: RobotConfig, tasks: Mapping[str, TaskSpec]
) -> dict[Split, list[tuple[str, int]]]:
    """Split the start states of all tasks into training and validation, by the keys of the section `robot`."""
    refuse_other_tasks(robot.held_out_tasks, list(tasks))
    return part_trials(
        tasks.values(),
        seed=config.trainer.seed,
        held_out=robot.held_out,
        trained=robot.trials,
        val_trained=robot.val_trained,
        val_evaluation=robot.val_evaluation,
        held_out_tasks=robot.held_out_tasks,
    )


def _refuse_other_task(robot: RobotConfig, shape: VisionShape, task: TaskSpec) -> None:
    if task.action_dim != robot.dim:
        raise ConfigError(
            f"actions of {task.name} have a different number of values",
            where="robot.dim",
            found=robot.dim,
            allowed=str(task.action_dim),
            fix=f"set robot.dim={task.action_dim}",
        )
    state = state_numbers(shape)
    if state and task.state_dim != state:
        raise ConfigError(
            f"the policy reads a robot state of another size than the task {task.name} has",
            where="model: proprio_dim or state_dim",
            found=state,
            allowed=str(task.state_dim),
            fix="use a policy of this robot, or set state_dim of a new policy (0: pictures only)",
        )
