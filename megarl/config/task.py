"""The task of a policy: it writes text, or a section of the recipe describes another task.

Whatever differs between tasks is a method of `Task`. `Task` implements writing text; every other task is a subclass in
its own package, which is imported when a recipe has the task's section.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from megarl.system.imports import import_callable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.artifacts.facts import ModelFacts
    from megarl.checks.checklist import Checklist
    from megarl.config.rollout import SamplingConfig
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement, TeamPlan
    from megarl.data.batch import Batch
    from megarl.data.loader import Described, PromptLoader
    from megarl.data.render import Split
    from megarl.planning.activations import Passes
    from megarl.planning.terms import Term
    from megarl.runtime.context import StepContext
    from megarl.runtime.rank_state import RankState
    from megarl.runtime.roles import RolloutRole
    from megarl.system.errors import ConfigError
    from megarl.system.metrics import Metrics
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout
    from megarl.training.sequence_layout import SequenceLayout

#: Recipe section -> class of the task that it describes.
SECTIONS = {"robot": "megarl.robots.task:RobotTask"}


class TaskPlayer(Protocol):
    """Generates the episodes of a task on one rank; replaces prompts, environment and text decoding."""

    def rows(self, split: Split) -> Described:
        """Return the data set of the episodes to play."""

    def take_policy(self, engine: MegatronEngine, config: RunConfig, layout: Layout) -> None:
        """Use the weights of `engine` for all further episodes. Collective over a replica."""

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
        """Play `sampling.n` episodes for each of B prompts; return B * `sampling.n` samples.

        Args:
            advance: is called with the number of newly finished episodes.
            scored: whether the samples get the fields that `TaskScores.score` needs.
        """

    def record(self, c: StepContext, samples: Batch) -> None:
        """Record the metrics of the episodes that the last `generate` returned."""

    def report_rows(self, run_dir: Path, step: int, samples: Batch, count: int) -> list[dict[str, Any]]:
        """Return the first `count` episodes as rows of the report's sample table for `step`."""

    def load_examples(self, c: RankState) -> PromptLoader:
        """Return the loader of the demonstrations for a cold start (SFT). Collective over the ranks of a team."""

    def close(self) -> None:
        """End the processes in which `generate` plays, such as simulators."""


class TaskScores(Protocol):
    """Scores episodes in the team that plays them."""

    @property
    def encoder(self) -> tuple[str, str] | None:
        """Recipe key and value that name the published encoder used for scores; None: the task uses no encoder."""

    def score(self, samples: Batch, step: int, metrics: Metrics) -> Tensor:
        """Return the scores of B episodes, float32 [B], and record their metrics. Collective over a team."""

    def files(self) -> dict[str, bytes]:
        """Return the contents of this object's files in a checkpoint, by name."""

    def load(self, folder: Path) -> None:
        """Load the files that `files` returned from the checkpoint `folder`."""


class Task:
    """All that depends on the kind of a policy's output, such as checks and exported values; this one is for text."""

    writes_text = True
    #: Why this task cannot hold rows out by `data.val_split`; None: it can.
    split_problem: str | None = None

    def check(self, config: RunConfig, placement: Placement | None, checks: Checklist, *, starts: bool) -> None:
        """Check the task's section, and keys that need this section. `starts`: whether the run starts on this machine
        now.
        """

    def plan_problem(self) -> ConfigError | None:
        """Return an error with the reason why `megarl plan` cannot handle this task; None if it can."""

    def call_tokens(self, config: RunConfig, facts: ModelFacts) -> tuple[int, int] | None:
        """Return the longest sequence and the response tokens of one policy call; None: a sample is one sequence."""

    def update_terms(self, config: RunConfig, facts: ModelFacts, role: str, passes: Passes) -> list[Term]:
        """Return the memory terms of an update of `role` on a device, without the language model's activations."""
        return []

    def generation_terms(self, config: RunConfig, facts: ModelFacts, team: TeamPlan) -> list[Term]:
        """Return the memory terms of generation on a device; only for tasks whose policy writes no text."""
        return []

    def score_terms(self, config: RunConfig, *, gpu: bool) -> list[Term]:
        """Return the memory terms of the model that scores episodes and of its samples; empty without a model."""
        return []

    def host_terms(self, config: RunConfig, facts: ModelFacts, team: TeamPlan, ranks: int, job: str) -> list[Term]:
        """Return the memory terms of episodes in host memory, for `ranks` ranks of a machine."""
        return []

    def pictures_per_call(self, config: RunConfig) -> int:
        """Return the number of pictures in the input of one policy call."""
        return 0

    def count_rows(self, config: RunConfig) -> int | None:
        """Return the number of training rows that this task makes itself; None: the rows are read from data files."""
        return None

    def prompt_fields(self, config: RunConfig) -> list[str]:
        """Return the fields of a prompt that episodes need."""
        return []

    def sample_fields(self, config: RunConfig) -> list[str]:
        """Return the sample fields that only episodes of this task have."""
        return []

    def model_fields(self, config: RunConfig) -> list[str]:
        """Return the sample fields that the model's forward pass needs in addition to tokens."""
        return []

    def place(self, config: RunConfig) -> str:
        """Return the name of the simulator that plays episodes; empty if there is none."""
        return ""

    def sequence_layout(self, config: RunConfig, hf: PretrainedConfig) -> SequenceLayout | None:
        """Return how samples become sequences of the model; None: the model's own layout is used."""

    def open_player(
        self, config: RunConfig, hf: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, layout: Layout
    ) -> TaskPlayer | None:
        """Start and return the player of episodes; None: the policy writes text."""

    def open_scores(self, config: RunConfig, layout: Layout) -> TaskScores | None:
        """Create the model that scores episodes; None: reward functions score them."""

    def checkpoint_files(self, hf: PretrainedConfig, layout: Layout) -> dict[str, bytes]:
        """Return the task's own checkpoint files that this rank writes, by name."""
        return {}

    def check_checkpoint(self, hf: PretrainedConfig, folder: Path) -> None:
        """Raise if the task's own files in a checkpoint do not match this run."""

    def complete_export(self, config: RunConfig, hf: PretrainedConfig, checkpoint: Path) -> None:
        """Add what only this kind of task exports, such as action statistics in `checkpoint`, to the config `hf`."""


TEXT = Task()


@cache
def _load(section: str) -> Task:
    return cast(Task, import_callable(SECTIONS[section], where=section, component=False)())


def task_of(config: RunConfig) -> Task:
    """Return the task of a recipe."""
    return next((_load(section) for section in SECTIONS if getattr(config, section) is not None), TEXT)


def check_tasks(config: RunConfig, placement: Placement | None, checks: Checklist, *, starts: bool) -> None:
    """Run the checks of all tasks, even if the recipe has no section for them.

    Args:
        starts: whether the run starts on this machine now.
    """
    for section in SECTIONS:
        _load(section).check(config, placement, checks, starts=starts)
