"""The loop of a separate rollout team that generates step by step, up to `async.max_staleness` steps before training.

megarl/dag/messages.py shows the messages of a step, with k = `async.max_staleness`. With k = 0 this team generates step
t + 1 after weights t have arrived, and no checkpoint contains its samples. In a run of T steps nothing is generated
with weights T - k to T - 1: the actor's team sends these weights only if they are validated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.dag.messages import StepGenerated
from megarl.dag.staleness import StalenessPolicy, policy_of
from megarl.disaggregated.in_order_checkpoint import BufferedStep, files_ahead, read_buffered_step
from megarl.disaggregated.rollout_team import evaluate_last, evaluate_step, post_loader_place
from megarl.runtime.generation import publish
from megarl.runtime.resume_compatibility import buffered_entry, steps_held
from megarl.runtime.validate import may_be_last, validates
from megarl.system.metrics import Metrics
from megarl.system.tracing import phase, set_step
from megarl.training.checkpoint import read_state

if TYPE_CHECKING:
    from megarl.dag.executor import Executor
    from megarl.disaggregated.buffer.channel import TeamChannel
    from megarl.runtime.checkpoint_part import CheckpointPart
    from megarl.runtime.rank_state import RankState
    from megarl.runtime.recorder import Recorder


@dataclass
class InOrderLoop:
    """Generates the samples of all steps of a run in a rollout team. All methods are collective over the team.

    Attributes:
        restored: samples of the first steps, from a checkpoint; they are handed over instead of generated samples.
    """

    c: RankState
    executor: Executor
    channel: TeamChannel
    recorder: Recorder
    checkpoints: CheckpointPart
    restored: list[BufferedStep]
    _ahead: list[BufferedStep] = field(default_factory=list)  # generated steps; training on them may be unfinished

    def run(self) -> None:
        """Generate all remaining steps, then follow the weights until the last training step."""
        c, policy = self.c, self._policy
        first, steps = c.context.step, policy.steps
        for step in range(first + 1, steps + 1):
            version = policy.oldest(step + 1)  # version with which the next step is generated
            c.context.step = step
            set_step(step)
            self.recorder.start_step(step)
            with phase("step"):
                generated = self._give_restored() if self.restored else self._generate()
                if policy.max_staleness and generated is not None:
                    self._ahead.append(generated)
                self._post_generated()
                if version > first:
                    self._follow(version)
            self.recorder.end_step(step)
            if version > first:
                self._evaluate_last(version)
                self._save(version)
        for version in range(max(first, policy.oldest(steps + 1)) + 1, steps + 1):
            with phase("step"):
                self._follow(version)
            self._evaluate_last(version)
            self._save(version)

    @property
    def _policy(self) -> StalenessPolicy:
        return policy_of(self.c.config)

    def _generate(self) -> BufferedStep | None:
        """Run this team's nodes on the next prompts; return the samples if a checkpoint may need them."""
        c = self.c
        assert c.loader is not None, "the checks require training data"
        with phase("load"):
            prompts = next(c.loader)
        self.executor.run(c.context, prompts, more=c.loader)
        if not self._policy.max_staleness:
            return None
        return BufferedStep(self.channel.given, Metrics.from_json(c.context.metrics.to_json()), c.context.step)

    def _give_restored(self) -> BufferedStep:
        """Hand over the next step's samples from the checkpoint instead of generating them, and return them."""
        c, generated = self.c, self.restored.pop(0)
        c.context.metrics.merge(generated.metrics)
        with phase("give"):
            self.channel.give_again(c.context.step, generated.given)
        return generated

    def _post_generated(self) -> None:
        """Post the loader's state, and report that this replica has generated the current step."""
        c = self.c
        post_loader_place(c)
        # Replicas report one by one, because a collective has a deadline and one of them may take much longer.
        if c.layout.is_lead:
            generated = StepGenerated(c.context.step)
            c.buffer.arrive(generated.name, generated.encode())

    def _follow(self, version: int) -> None:
        """Receive the weights `version` if anything is generated with them, and validate if it is due."""
        c, validated = self.c, validates(self.c.config, version)
        if not self._policy.samples_with(version, validates=validated or may_be_last(c.config, version)):
            return
        publish(c, version)
        if validated:
            evaluate_step(c, self.recorder, version)

    def _evaluate_last(self, version: int) -> None:
        with phase("step"):
            evaluate_last(self.c, self.recorder, version)

    def _save(self, version: int) -> None:
        """Write this team's part of the checkpoint of step `version`, if one is due."""
        self._ahead = [generated for generated in self._ahead if generated.step > version]
        files = partial(files_ahead, self.c.layout, version, self._ahead)
        self.checkpoints.write_part(version, last=version == self.c.config.trainer.steps, files=files)


def find_buffered_steps(c: RankState, source: Path, step: int) -> list[BufferedStep]:
    """Return this replica's share of the generated steps after `step` that the checkpoint at `source` contains."""
    saved = buffered_entry(read_state(source))
    if saved is None:
        return []
    given = c.team.placement.given_by(c.team.plan.name)
    steps = range(step + 1, step + 1 + steps_held(saved))
    return [read_buffered_step(source, step, ahead, saved["parts"], c.layout, given) for ahead in steps]
