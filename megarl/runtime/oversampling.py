"""Oversampling: a round of generation starts more prompt groups than it needs, and ends when enough are complete.

    new prompts --.                                     .--> the first groups that are complete: samples of the step
                   >--  groups in flight, ceil(o * B) --<
    carried on ---'     (megarl/rollout/first_complete)  '--> the others: in flight again in the next round
                                                              (`rollout.carry_steps: 0`: their prompts begin again)

B is the number of groups that a round needs, o is `rollout.oversample`. A group stays on its replica, with its
environments, until it is complete. A round ends only when every group that began `rollout.carry_steps` steps ago is
complete, and trains on these groups first. So no sample begins more than `rollout.carry_steps` steps before its update.

A checkpoint holds the groups in flight of every replica:

    carried_0.json                step in which each group began, and its partial trajectories, by number
    carried_0_images.safetensors  patches of their images; missing without images
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.batch import Batch
from megarl.data.in_flight_loader import InFlightLoader
from megarl.data.partials import partials_from_json, partials_to_json, patches_of
from megarl.rollout.first_complete import Complete, first_complete
from megarl.runtime.exchange import GroupPool
from megarl.runtime.samples import groups_of_prompts, open_groups, samples_of
from megarl.runtime.stages.rollout import refuse_broken_logprobs, with_data_prompts
from megarl.system.errors import ConfigError, count

if TYPE_CHECKING:
    from megarl.config.rollout import RolloutConfig
    from megarl.config.run import RunConfig
    from megarl.data.trajectory import Trajectory
    from megarl.rollout.groups import GroupGenerator
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import RolloutRole


@dataclass(frozen=True)
class InFlight:
    """A prompt group that has begun and that no step has trained on.

    Attributes:
        begun: the step in which the group's samples began.
        prompt: the group's prompt, a batch of one; None: the run has resumed, and has not read the prompt again yet.
        partial: the group's trajectories from the checkpoint from which the run resumed; None: the generator has the
            trajectories, or the group begins again.
    """

    begun: int
    prompt: Batch | None = None
    partial: list[Trajectory] | None = None


class Oversampling:
    """Generates the samples of training steps, and keeps this replica's prompt groups in flight from step to step.

    Args:
        loader: draws the new prompts of each round.
    """

    def __init__(self, loader: InFlightLoader) -> None:
        self._loader = loader
        self._groups: dict[int, InFlight] = {}  # this replica's groups, by number
        self._outside: set[int] = set()  # numbers of groups that are not in the generator yet
        self._ready: dict[int, list[Trajectory]] = {}  # complete groups that no step has trained on, by number
        self._generator: GroupGenerator | None = None

    def generate(self, c: StepContext, rollout: RolloutRole, prompts: Batch) -> Batch:
        """Generate until enough groups are complete, and return this replica's share of their samples.

        Every replica gets the same number of whole groups. Collective over all ranks that generate.

        Args:
            prompts: this replica's new prompts, which the loader has just drawn.

        Raises:
            RolloutError: a log-prob is not finite.
            EpisodeError: an environment failed, and `env.on_error` is `fail`.
        """
        settings, n = c.config.rollout, c.config.rollout.sampling.n
        wanted, last = self._loader.batch_size, c.step - settings.carry_steps
        for place, number in enumerate(self._loader.numbers):
            self._groups[number] = InFlight(c.step, prompts.select([place]))
        self._outside.update(self._loader.numbers)
        if self._generator is None:
            slots = n * max(self._loader.rank_most, len(self._groups))
            self._generator = open_groups(c, rollout, settings.sampling, slots, training=True)
        started = sum(self._groups[number].partial is None for number in self._outside)
        self._begin(c, self._generator)
        required = [number for number, group in self._groups.items() if settings.carries and group.begun <= last]
        with rollout.generating(c, wanted * n) as advance:
            complete = first_complete(
                self._generator,
                c.layout,
                wanted,
                required,
                self._ready,
                by_steps=settings.ready_by == "steps",
                advance=advance,
            )
        shares = c.layout.dp_group.all_gather_json([[number, self._groups[number].begun] for number in required])
        begun = {number: step for share in shares for number, step in share}
        chosen = complete.first(wanted, lambda number: begun.get(number, c.step))
        c.metrics.sum("oversample/started", started)
        c.metrics.sum("oversample/completed", len(complete.trajectories))
        samples = self._take(c, rollout, prompts, [number for number in chosen if number in self._groups], complete)
        self._keep(c, self._generator, complete)
        return samples

    def _begin(self, c: StepContext, generator: GroupGenerator) -> None:
        """Add the groups that are not in the generator yet to it, in the order of their numbers."""
        n = c.config.rollout.sampling.n
        for number in sorted(self._outside):
            entry = self._groups[number]
            prompt = self._loader.at(number) if entry.prompt is None else entry.prompt
            [group] = groups_of_prompts(c, prompt, n, [number])
            partial = entry.partial if entry.partial is not None and len(entry.partial) == n else None
            again = generator.add(group, partial)
            if again and c.layout.is_lead:
                why = "exceed the current limits or come from another environment"
                print(f"group {group.uid}: restarting {again} of its samples, which {why}", flush=True)
            self._groups[number] = InFlight(c.step if partial is None else entry.begun, prompt)
        self._outside.clear()

    def _take(
        self, c: StepContext, rollout: RolloutRole, prompts: Batch, numbers: Sequence[int], complete: Complete
    ) -> Batch:
        """Remove this replica's complete groups `numbers`, exchange the removed groups with the other replicas, and
        return the samples of this replica's share."""
        entries = [self._groups.pop(number) for number in numbers]
        if ages := [c.step - entry.begun for entry in entries]:
            c.metrics.mean("oversample/age/mean", sum(ages), len(ages))
            c.metrics.max("oversample/age/max", max(ages))
        rows = [entry.prompt for entry in entries if entry.prompt is not None]
        theirs = Batch.concat(rows) if rows else prompts.select([])
        groups = [complete.trajectories.pop(number) for number in numbers]
        samples = samples_of(rollout, theirs, groups, c.config.rollout.sampling)
        samples = with_data_prompts(c.config, samples, theirs)
        refuse_broken_logprobs(samples)
        pool = GroupPool(c.layout.dp_group)
        pool.add(samples, [True] * len(numbers), numbers)
        return pool.split(len(pool))[0]

    def _keep(self, c: StepContext, generator: GroupGenerator, complete: Complete) -> None:
        """Carry the groups that this round did not use on to the next one, or drop their samples (`carry_steps` 0)."""
        settings, tokens = c.config.rollout, 0
        self._ready = complete.trajectories
        c.metrics.sum("oversample/dropped", 0 if settings.carries else len(self._groups))
        if not settings.carries:
            for number, group in self._groups.items():
                dropped = self._ready[number] if number in self._ready else generator.drop(number)
                tokens += sum(len(lane.token_ids) for trajectory in dropped for lane in trajectory.all_lanes)
                self._groups[number] = InFlight(c.step, group.prompt)
            self._outside, self._ready = set(self._groups), {}
            c.metrics.sum("oversample/dropped_tokens", tokens)
        self.count(c, c.step)
        c.metrics.max("oversample/carried", self.in_flight if settings.carries else 0)

    def count(self, c: StepContext, step: int) -> None:
        """Set in the loader how many groups are in flight, and how many the steps after `step` need, so that it draws
        no more prompts than needed. Collective."""
        self._loader.in_flight = c.layout.dp_group.all_gather_json(len(self._groups))
        self._loader.needed = groups_needed(c.config, step)

    @property
    def in_flight(self) -> int:
        """Number of groups in flight on all replicas."""
        return sum(self._loader.in_flight)

    def close(self) -> None:
        """Drop all groups and their environments. Not collective."""
        if self._generator is not None:
            self._generator.close()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def files(self, c: StepContext) -> dict[str, bytes]:
        """Return the checkpoint files of this replica's groups in flight, by name; empty except on its first rank."""
        if not c.layout.is_lead:
            return {}
        generated = {} if self._generator is None else self._generator.partial()
        restored = {number: group.partial for number, group in self._groups.items() if group.partial is not None}
        partials = {**restored, **generated, **self._ready}
        content = {
            "begun": {str(number): group.begun for number, group in self._groups.items()},
            "partials": partials_to_json(partials),
        }
        stem = _stem(c.layout.dp_rank)
        files = {f"{stem}.json": json.dumps(content).encode()}
        if (patches := patches_of(partials.values())) is not None:
            files[_images(stem)] = patches
        return files

    def load(self, c: StepContext, folder: Path, saved: Mapping[str, Any]) -> None:
        """Read this replica's share of the groups in flight from a checkpoint. If the sampling temperature has changed,
        or groups are not carried on, they begin again.

        With as many replicas as before, each takes its own groups. Collective over the replicas.

        Args:
            saved: the result of `carried_entry` in the checkpoint.

        Raises:
            ConfigError: steps of a smaller batch cannot train on all of the groups in time.
        """
        rank, size, parts = c.layout.dp_rank, c.layout.dp_size, saved["parts"]
        keeps = saved["temperature"] == c.temperature and c.config.rollout.carries
        groups: dict[int, InFlight] = {}
        for part in [rank] if parts == size else range(parts):
            content = json.loads((folder / f"{_stem(part)}.json").read_text())
            partials = partials_from_json(content["partials"], folder / _images(_stem(part)))
            groups |= {
                int(number): InFlight(begun, None, partials.get(int(number)) if keeps else None)
                for number, begun in content["begun"].items()
            }
        numbers = sorted(groups) if parts == size else sorted(groups)[rank::size]
        self._groups = {number: groups[number] for number in numbers}
        self._outside = set(numbers)
        self.count(c, c.step)
        self._refuse_too_many(c)
        if c.layout.rank == 0:
            again = "" if keeps or not saved["carries"] else ", which begin again: other settings of sampling"
            print(f"{count(self.in_flight, 'prompt group')} of the checkpoint in flight{again}", flush=True)

    def _refuse_too_many(self, c: StepContext) -> None:
        """Refuse groups of a larger batch if some could be older than `rollout.carry_steps` when they are used."""
        settings, size, steps = c.config.rollout, self._loader.batch_size, c.config.trainer.steps
        if not settings.carries:
            return
        steps_begun = [c.step + 1 if group.partial is None else group.begun for group in self._groups.values()]
        begun = [step for part in c.layout.dp_group.all_gather_json(steps_begun) for step in part]
        crowded = first_crowded_step(begun, c.step, steps, settings, size)
        if crowded is not None:
            larger = range(size + 1, len(begun) + 1)
            least = next(each for each in larger if first_crowded_step(begun, c.step, steps, settings, each) is None)
            where = "data.batch_size" if settings.round_prompts is None else "rollout.round_prompts"
            step, due = crowded
            raise ConfigError(
                f"the checkpoint has {count(self.in_flight, 'prompt group')} in flight, and step {step} could have to "
                f"train on {due} of them (rollout.carry_steps={settings.carry_steps}): too many for this batch",
                where=where,
                found=size,
                allowed=f"{least} or more",
                fix=f"set {where}={least}, or rollout.carry_steps=0, with which their prompts begin again",
            )


def first_crowded_step(
    begun: Sequence[int], step: int, steps: int, rollout: RolloutConfig, size: int
) -> tuple[int, int] | None:
    """Return the first step after `step` in which more groups than a batch has could be due, and their number; None:
    there is none up to step `steps`.

    In the worst case, the groups that complete first, apart from those that are due, are always the youngest ones. When
    no more groups than a batch has are left, no later step has more, because `rollout.oversample` is at most 2.

    Args:
        begun: the step in which each group in flight began.
        size: number of groups that a step trains on.
    """
    left = sorted(begun)
    for now in range(step + 1, steps + 1):
        due = sum(each <= now - rollout.carry_steps for each in left)
        if due > size:
            return now, due
        left += [now] * max(0, rollout.in_flight(size) - len(left))
        left = left[due : len(left) - (size - due)]
        if len(left) <= size:
            break
    return None


def groups_needed(config: RunConfig, step: int) -> int | None:
    """Return how many groups the steps after `step` train on; None: unknown, because of dynamic sampling."""
    if config.algorithm.dynamic_sampling.enabled:
        return None
    return (config.trainer.steps - step) * config.data.batch_size


def carried_entry(c: StepContext, oversampling: Oversampling | None) -> dict[str, Any] | None:
    """Return the entry about groups in flight for `state.json` of a checkpoint; None: the run does not oversample."""
    if oversampling is None:
        return None
    settings = {"temperature": c.temperature, "carries": c.config.rollout.carries}
    return {"parts": c.layout.dp_size, "groups": oversampling.in_flight, **settings}


def _stem(part: int) -> str:
    return f"carried_{part}"


def _images(stem: str) -> str:
    return f"{stem}_images.safetensors"
