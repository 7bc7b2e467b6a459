"""The task of a policy: it writes text, or a section of the recipe describes another task.

`config.task` answers what differs between tasks. `Task` has the answers for text; every other task is a subclass of it
in a package of its own, which is imported when a recipe has the task's section.
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

#: Section of the recipe -> class of its task.
SECTIONS = {"robot": "megarl.robots.task:RobotTask"}


class TaskPlayer(Protocol):
    """Plays the episodes of a task on one rank, in the place of prompts, an environment and the decoding of text."""

    def rows(self, split: Split) -> Described:
        """Return the data set of the episodes to play."""

    def take_policy(self, engine: MegatronEngine, config: RunConfig, layout: Layout) -> None:
        """Play with the weights of `engine` from here on. Collective over a replica."""

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
        """Play `sampling.n` episodes of each of B prompts; `scored`: with everything that the scores read."""

    def record(self, c: StepContext, samples: Batch) -> None:
        """Count the metrics of the episodes that `generate` returned last."""

    def report_rows(self, run_dir: Path, step: int, samples: Batch, count: int) -> list[dict[str, Any]]:
        """Return the first `count` episodes for the report's table of samples of `step`."""

    def load_examples(self, c: RankState) -> PromptLoader:
        """Load the examples of a cold start. Collective over the ranks of a team."""

    def close(self) -> None:
        """End what `generate` plays in."""


class TaskScores(Protocol):
    """Scores of a step's episodes, in the team that plays them."""

    @property
    def encoder(self) -> tuple[str, str] | None:
        """Key and value of the recipe that name a published encoder; None: there is none."""

    def score(self, samples: Batch, step: int, metrics: Metrics) -> Tensor:
        """Return the scores, float32 [B], and count their metrics. Collective over the ranks of a team."""

    def files(self) -> dict[str, bytes]:
        """Return the contents of this object's files in a checkpoint, by name."""

    def load(self, folder: Path) -> None:
        """Load the files that `files` returned from the checkpoint `folder`."""


class Task:
    """The task of a policy that writes text."""

    writes_text = True
    #: Why `data.val_split` holds no rows out; None: it does.
    split_problem: str | None = None

    def check(self, config: RunConfig, placement: Placement | None, checks: Checklist, *, starts: bool) -> None:
        """Check the task's section, and keys that only make sense with it. `starts`: the run starts here."""

    def plan_problem(self) -> ConfigError | None:
        """Return the error that says why no formulas plan a step; None: they do."""

    def call_tokens(self, config: RunConfig, facts: ModelFacts) -> tuple[int, int] | None:
        """Return columns and response tokens of a policy call; None: a sample is one sequence."""

    def update_terms(self, config: RunConfig, facts: ModelFacts, role: str, passes: Passes) -> list[Term]:
        """Return the memory terms of an update of `role` on a device, in addition to the language model's
        activations."""
        return []

    def score_terms(self, config: RunConfig, *, gpu: bool) -> list[Term]:
        """Return the memory terms of the model that scores episodes and of the samples it scores; empty without a
        model."""
        return []

    def host_terms(self, config: RunConfig, facts: ModelFacts, team: TeamPlan, ranks: int, job: str) -> list[Term]:
        """Return the memory terms of episodes in host memory, for `ranks` ranks of a machine."""
        return []

    def pictures_per_call(self, config: RunConfig) -> int:
        """Return the number of pictures that a policy call sees."""
        return 0

    def prompt_fields(self, config: RunConfig) -> list[str]:
        """Return the columns of a prompt that episodes read."""
        return []

    def sample_fields(self, config: RunConfig) -> list[str]:
        """Return the fields that episodes have in addition to those of every sample."""
        return []

    def model_fields(self, config: RunConfig) -> list[str]:
        """Return the fields that a model reads in addition to tokens."""
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
        """Return the further files of a checkpoint that this rank writes."""
        return {}

    def check_checkpoint(self, hf: PretrainedConfig, folder: Path) -> None:
        """Refuse a checkpoint whose further files differ from this run's."""

    def complete_export(self, config: RunConfig, hf: PretrainedConfig, checkpoint: Path) -> None:
        """Put on `hf` what an export of a checkpoint writes in addition."""


TEXT = Task()


@cache
def _load(section: str) -> Task:
    return cast(Task, import_callable(SECTIONS[section], where=section, component=False)())


def task_of(config: RunConfig) -> Task:
    """Return the task of a recipe."""
    return next((_load(section) for section in SECTIONS if getattr(config, section) is not None), TEXT)


def check_tasks(config: RunConfig, placement: Placement | None, checks: Checklist, *, starts: bool) -> None:
    """Check the sections of all tasks, also of those that the recipe leaves out. `starts`: the run starts here."""
    for section in SECTIONS:
        _load(section).check(config, placement, checks, starts=starts)
