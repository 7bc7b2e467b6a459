"""The first argument of every stage: the run's configuration and the state of the current step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from megarl.algorithms.advantages.rae import RunningBaselines
from megarl.artifacts.draft_training import facts_with_draft
from megarl.config.run import RunConfig
from megarl.data.image_set import image_features
from megarl.models.hf import facts_of
from megarl.planning.flops import FlopCounter
from megarl.planning.vision import expert_flops, image_flops, picture_flops
from megarl.rollout.seeds import Seeds
from megarl.system.metrics import Metrics
from megarl.system.offload_schedule import OffloadSchedule
from megarl.training.sequence_layout import TEXT, SequenceLayout

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from megarl.algorithms.kl import KLController
    from megarl.artifacts.facts import ModelFacts
    from megarl.config.task import TaskScores
    from megarl.data.batch import Batch
    from megarl.data.curriculum import CurriculumLoader
    from megarl.runtime.replay import ReplayStore
    from megarl.training.parallel import Layout


@contextlib.contextmanager
def no_progress(description: str, total: int | None) -> Iterator[Callable[[float], None]]:
    """Show no progress bar; a replacement for `megarl.tracking.tracker.Tracker.progress`."""
    yield lambda units: None


@dataclass
class StepContext:
    """The first argument of every stage. Stages get models and servers as further arguments, by role."""

    config: RunConfig
    layout: Layout
    hf_config: PretrainedConfig
    offload: OffloadSchedule  # moves models on and off the device for each phase; roles enter its phases by themselves
    kl_controller: KLController  # holds the coefficient of the KL penalty in the reward
    resting: int = 0  # number of first steps in which only the critic is trained (`critic.warmup_steps`)
    step: int = 0  # the current training step (1-based; 0 before the first)
    metrics: Metrics = field(default_factory=Metrics)  # this rank's metrics of the step, before they are reduced
    # shows a progress bar on the console, on the rank with the tracker; does nothing elsewhere
    progress: Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[float], None]]] = no_progress
    # this rank's share of the scored groups that dynamic sampling left over for the next step
    surplus: Batch | None = None
    baselines: RunningBaselines = field(default_factory=RunningBaselines)  # the policies' running mean scores (RAE)
    replay: ReplayStore | None = None  # groups to train on again; only in the team that trains
    curriculum: CurriculumLoader | None = None  # draws prompts by past success; only in the team that generates
    sequences: SequenceLayout = TEXT  # how samples are laid out as input sequences of the model
    # the task's own scoring of episodes, in the team that plays them; None: a reward function scores
    scores: TaskScores | None = None
    # numbers of the groups at which mini-batches begin, for sharing groups by tokens (`TeamPlan.cuts`); None: replicas
    # get the groups round-robin
    cuts: tuple[int, ...] | None = None
    tokens: int | None = None  # size of the tokenizer's vocabulary, without the model's padding; None: unknown

    @property
    def seeds(self) -> Seeds:
        """The seeds of everything random in the run."""
        return Seeds(self.config.trainer.seed)

    @property
    def temperature(self) -> float:
        """The temperature at which samples are generated and scored."""
        return self.config.rollout.sampling.temperature

    @cached_property
    def flops(self) -> FlopCounter:
        """The counter of the policy's FLOPs, for `perf/flops` and MFU."""
        return FlopCounter.of(self._facts)

    @cached_property
    def _facts(self) -> ModelFacts:
        return facts_with_draft(self.config, facts_of(self.hf_config))

    def vision_flops(self, samples: Batch) -> float:
        """Return the FLOPs of one forward pass of the vision encoder over the samples' images, each image counted once,
        and of the action expert if the model has one."""
        vision, encoder = self._facts.vision, self._facts.encoder
        if vision is not None:
            calls = sum(map(len, self.sequences.sample_columns(samples)))
            pictures = calls * self.config.task.pictures_per_call(self.config) * picture_flops(vision)
            numbers = int(samples["response_ids"].lengths.sum())
            return pictures + (0.0 if vision.expert is None else expert_flops(vision.expert, numbers))
        if encoder is None:
            return 0.0
        return image_flops(encoder, [encoder.merge**2 * count for count in image_features(samples).values()])

    def count_pass(self, samples: Batch, *, train: bool = False, head: bool = True) -> None:
        """Add the FLOPs of one forward pass over the samples to `perf/flops`; `train`: with the backward pass; `head`:
        with the output layer."""
        responses = samples["response_ids"].lengths
        count = self.flops.train if train else self.flops.forward
        lengths = [length for lengths in self.sequences.sample_columns(samples) for length in lengths]
        times = 3 if train and "tower" not in self.config.model.freeze else 1
        seen = times * self.vision_flops(samples)
        acts = self._facts.vision is not None and self._facts.vision.expert is not None
        tokens = int(responses.sum()) if head and not acts else 0  # an action expert has no output layer
        flops = count(lengths, head_tokens=tokens) + seen
        if train and head:  # an update of the policy, which may have a draft head
            flops += self.flops.train_draft(lengths, tokens)
        self.metrics.sum("perf/flops", flops)

    def all_sum(self, values: Tensor) -> Tensor:
        """Return the sum of a small CPU tensor over the data-parallel ranks."""
        return self.layout.dp_group.all_reduce(values.clone())
