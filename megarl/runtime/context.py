"""The first argument of every stage: the settings, and what belongs to the step that runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from megarl.config.run import RunConfig
from megarl.data.image_set import image_features
from megarl.models.hf import facts_of
from megarl.planning.flops import FlopCounter
from megarl.planning.vision import image_flops, picture_flops
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
    from megarl.training.parallel import Layout


@contextlib.contextmanager
def no_progress(description: str, total: int | None) -> Iterator[Callable[[float], None]]:
    """Show nothing; see `megarl.tracking.tracker.Tracker.progress`."""
    yield lambda units: None


@dataclass
class StepContext:
    """The first argument of every stage. Models and servers are not here: a stage names the roles that it works with.

    Attributes:
        offload: has on the device what each phase needs; roles enter its phases by themselves.
        kl_controller: weight of the KL penalty in the reward.
        resting: steps at the start in which the policy is not trained, while a critic warms up.
        step: the training step that runs (1-based; 0 before the first).
        metrics: this rank's part of the step's metrics.
        progress: shows long work on the console; only on the rank that has a tracker, while it has one.
        surplus: this rank's share of the scored groups that dynamic sampling left over for the next step.
        sequences: how samples become sequences of the model.
        scores: of episodes that no reward function scores, in the team that plays them.
        cuts: where mini-batches begin, which replicas share by tokens (`TeamPlan.cuts`); None: round-robin.
        tokens: number of the tokenizer's tokens; the model may have more, as padding. None: they are not compared.
    """

    config: RunConfig
    layout: Layout
    hf_config: PretrainedConfig
    offload: OffloadSchedule
    kl_controller: KLController
    resting: int = 0
    step: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    progress: Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[float], None]]] = no_progress
    surplus: Batch | None = None
    sequences: SequenceLayout = TEXT
    scores: TaskScores | None = None
    cuts: tuple[int, ...] | None = None
    tokens: int | None = None

    @property
    def seeds(self) -> Seeds:
        """Of all that is drawn at random."""
        return Seeds(self.config.trainer.seed)

    @property
    def temperature(self) -> float:
        """Temperature that samples are generated and scored at."""
        return self.config.rollout.sampling.temperature

    @cached_property
    def flops(self) -> FlopCounter:
        """Counts what the policy computes, for `perf/flops` and with it MFU."""
        return FlopCounter.of(self._facts)

    @cached_property
    def _facts(self) -> ModelFacts:
        return facts_of(self.hf_config)

    def vision_flops(self, samples: Batch) -> float:
        """Return the FLOPs of one forward pass over what samples see, each image once."""
        vision, encoder = self._facts.vision, self._facts.encoder
        if vision is not None:
            calls = sum(map(len, self.sequences.sample_columns(samples)))
            return calls * self.config.task.pictures_per_call(self.config) * picture_flops(vision)
        if encoder is None:
            return 0.0
        return image_flops(encoder, [encoder.merge**2 * count for count in image_features(samples).values()])

    def count_pass(self, samples: Batch, *, train: bool = False, head: bool = True) -> None:
        """Add one pass over whole samples to `perf/flops`: forward, with `train` also backward, with the vocabulary."""
        responses = samples["response_ids"].lengths
        count = self.flops.train if train else self.flops.forward
        lengths = [length for lengths in self.sequences.sample_columns(samples) for length in lengths]
        times = 3 if train and "tower" not in self.config.model.freeze else 1
        seen = times * self.vision_flops(samples)
        self.metrics.sum("perf/flops", count(lengths, head_tokens=int(responses.sum()) if head else 0) + seen)

    def all_sum(self, values: Tensor) -> Tensor:
        """Sum of a small CPU tensor over the data-parallel ranks."""
        return self.layout.dp_group.all_reduce(values.clone())
