"""The task of a recipe with the section `robot`: the policy acts in episodes of a simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.artifacts.facts import ModelFacts
from megarl.config.run import RunConfig
from megarl.config.task import Task, TaskPlayer, TaskScores
from megarl.dag.placement import Placement, TeamPlan
from megarl.planning.activations import Passes
from megarl.planning.shards import BYTES, key_value_bytes
from megarl.planning.terms import Term, term
from megarl.robots.checks.recipe import check_robot
from megarl.robots.config import CHAIN, END_FRAMES, FRAMES, RobotConfig, clip_fields, robot_of
from megarl.robots.envs.settings import SimulatorSettings
from megarl.robots.models.vla.calls import FLOW
from megarl.robots.planning import (
    call_columns,
    encoder_bytes,
    episode_bytes,
    expert_bytes,
    recorder_bytes,
    response_numbers,
    tower_bytes,
)
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.checks.checklist import Checklist
    from megarl.training.parallel import Layout
    from megarl.training.sequence_layout import SequenceLayout

#: Sample fields of episodes, except pictures.
EPISODE_FIELDS = (
    *("turn_starts", "turn_ends", "turn_rewards", "env_error", "task", "trial", "success", "finish_step", "max_steps"),
    *("progress", "call_progress", "states", "end_state"),
    *("prompt_ids", "prompt_text"),
)


def _chain_fields(config: RunConfig) -> list[str]:
    return [CHAIN] if robot_of(config).family == FLOW else []


class RobotTask(Task):
    """The task of a policy that acts in a simulator."""

    writes_text = False
    split_problem = "start states are held out of a simulator's by robot.held_out"

    def check(self, config: RunConfig, placement: Placement | None, checks: Checklist, *, starts: bool) -> None:
        """Check the section `robot`, and that no other setting conflicts with it."""
        check_robot(config, placement, checks, starts=starts)

    def plan_problem(self) -> ConfigError | None:
        """Return the error that `megarl plan` cannot handle recipes with simulators."""
        return ConfigError(
            "the formulas cover language models, but most of a robot's step is spent in simulators and vision towers",
            where="robot",
            found="a robot's recipe",
            allowed="recipes of language models",
            fix="measure instead: megarl bench envs, and the timings of a short run",
        )

    def call_tokens(self, config: RunConfig, facts: ModelFacts) -> tuple[int, int] | None:
        """Return the sequence length and the action tokens of one policy call; None without a vision model."""
        robot = robot_of(config)
        return None if facts.vision is None else (call_columns(robot, facts.vision), response_numbers(robot))

    def update_terms(self, config: RunConfig, facts: ModelFacts, role: str, passes: Passes) -> list[Term]:
        """Return the device memory terms of a micro-batch's activations in the vision towers and the action expert."""
        if facts.vision is None:
            return []
        robot, element, calls = robot_of(config), BYTES[config.model.dtype], passes.tokens // passes.longest
        seen = calls * self.pictures_per_call(config) * tower_bytes(facts.vision, element)
        acting, size = calls * expert_bytes(robot, facts.vision, element), f"{role}.engine.micro_batch_tokens"
        terms = [term("vision towers at work", seen, f"{size}, robot.cameras", rough=True)]
        return terms + (
            [term("action expert at work", acting, f"{size}, robot.flow.steps", rough=True)] if acting else []
        )

    def generation_terms(self, config: RunConfig, facts: ModelFacts, team: TeamPlan) -> list[Term]:
        """Return the memory term of the key/value cache, for policies that predict action tokens one after another;
        empty for policies that predict all tokens of a call in one pass.
        """
        robot, parallel = robot_of(config), team.parallel
        if robot.family != "openvla" or facts.vision is None:
            return []
        columns = call_columns(robot, facts.vision)
        calls = max(1, min(_workers(robot), config.actor.engine.micro_batch_tokens // columns))
        most = parallel.most_layers(facts.layers) / facts.layers
        size = most * columns * key_value_bytes(facts, parallel.tp, config.model.dtype)
        keys = "robot.simulator.workers, actor.engine.micro_batch_tokens"
        return [Term(f"key/value cache of {calls} policy calls", calls * size, keys, size)]

    def score_terms(self, config: RunConfig, *, gpu: bool) -> list[Term]:
        """Return the device memory of the video encoder's parameters and of a batch of clips; empty without one."""
        parameters, passing = encoder_bytes(config, gpu=gpu)
        if not parameters:
            return []
        return [
            term("an encoder of videos", parameters, "robot.reward.embedding.path", rough=True),
            term("clips in the encoder of videos", passing, "robot.reward.embedding.batch_size", rough=True),
        ]

    def host_terms(self, config: RunConfig, facts: ModelFacts, team: TeamPlan, ranks: int, job: str) -> list[Term]:
        """Return the host memory of a step's pictures, on every rank that has them, and of frames kept for clips."""
        if facts.vision is None:
            return []
        rows = config.data.batch_size * config.rollout.sampling.n
        if job != "train":
            rows = min(n for n in (config.data.val_batch_size, config.data.max_val_samples, 64) if n is not None)
        episodes = ranks * -(-rows // team.replicas)
        longest, shortest = episode_bytes(config, facts.vision)
        keys = "data.batch_size, rollout.sampling.n, robot.simulator.max_steps"
        # Episodes that succeed end before their limit, so only the pictures of the shortest episodes are certain.
        terms = [Term(f"pictures of {episodes} episodes", episodes * longest, keys, episodes * shortest)]
        if job == "train" and (frames := recorder_bytes(config)):
            count = max(1, ranks // team.parallel.model_parallel_size) * _workers(robot_of(config))
            terms.append(Term(f"frames of {count} episodes at a time", count * frames, "robot.simulator.workers", 0.0))
        return terms

    def pictures_per_call(self, config: RunConfig) -> int:
        """Return the number of cameras, each of which takes one picture per policy call."""
        return len(robot_of(config).cameras)

    def count_rows(self, config: RunConfig) -> int | None:
        """Return the number of start states for training; a process of the simulator is started to list them."""
        from megarl.robots.setup import count_start_states

        return count_start_states(config)

    def prompt_fields(self, config: RunConfig) -> list[str]:
        """Return the fields with the start state and the instruction."""
        return ["row", "prompt_text"]

    def sample_fields(self, config: RunConfig) -> list[str]:
        """Return the sample fields of episodes, including pictures and clips."""
        cameras = robot_of(config).cameras
        pictures = [prefix + camera for prefix in (FRAMES, END_FRAMES) for camera in cameras]
        return [*EPISODE_FIELDS, *_chain_fields(config), *pictures, *clip_fields(config)]

    def model_fields(self, config: RunConfig) -> list[str]:
        """Return the fields that the model reads in addition to tokens: pictures, states, denoising chains, and where
        each policy call starts and ends."""
        pictures = [FRAMES + camera for camera in robot_of(config).cameras]
        return ["turn_starts", "turn_ends", "states", *_chain_fields(config), *pictures]

    def place(self, config: RunConfig) -> str:
        """Return the simulator's name."""
        return str(robot_of(config).simulator.get("name"))

    def sequence_layout(self, config: RunConfig, hf: PretrainedConfig) -> SequenceLayout | None:
        """Return how policy calls become sequences."""
        from megarl.robots.setup import vla_layout

        return vla_layout(config, hf)

    def open_player(
        self, config: RunConfig, hf: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, layout: Layout
    ) -> TaskPlayer | None:
        """Start the simulators."""
        from megarl.robots.setup import open_robots

        return open_robots(config, hf, tokenizer, layout)

    def open_scores(self, config: RunConfig, layout: Layout) -> TaskScores | None:
        """Return the scorer that `robot.reward` configures."""
        from megarl.robots.scores import EpisodeScores

        return EpisodeScores.of(config, layout)

    def checkpoint_files(self, hf: PretrainedConfig, layout: Layout) -> dict[str, bytes]:
        """Return the file with the action statistics."""
        from megarl.robots.setup import statistics_file

        return statistics_file(hf, layout)

    def check_checkpoint(self, hf: PretrainedConfig, folder: Path) -> None:
        """Raise if a checkpoint has other action statistics than this run."""
        from megarl.robots.setup import check_same_statistics

        check_same_statistics(hf, folder)

    def complete_export(self, config: RunConfig, hf: PretrainedConfig, checkpoint: Path) -> None:
        """Set the checkpoint's action statistics on the config `hf`."""
        from megarl.artifacts.action_statistics import FILE, read_statistics
        from megarl.robots.setup import model_statistics

        file = checkpoint / FILE  # checkpoints of older versions lack this file
        known = read_statistics(file) if file.is_file() else dict([model_statistics(config, robot_of(config))])
        hf.action_statistics = known


def _workers(robot: RobotConfig) -> int:
    """Return how many episodes the simulators of one replica play at the same time."""
    return int(robot.simulator.get("workers", SimulatorSettings.model_fields["workers"].default))
