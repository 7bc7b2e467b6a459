"""The loop of a rollout team whose finished groups go to training one by one (`async.order=as_ready`).

megarl/dag/messages.py shows the messages of a weight update. Between two updates a replica generates with one version
of the weights; this time is a segment. With `async.partial` the actor's team requests an update after every step:
groups in flight stop, and continue with the new weights. Without `async.partial`, a replica accepts new weights when
it has finished all groups that may begin with the current version; the actor's team checks this between two steps. It
requests an update and waits only at a validation, when a save may be due, at the end of the run, and when the current
weights are too old for the next step.

A group whose rewards are being computed is put aside at the node that waits for them, and generation continues. With
`async.partial` the weights may change meanwhile; a checkpoint waits for these rewards.

The metrics of samples are sent with the samples. Metrics of a replica count in the step whose weights end its segment.
Finished groups are in the buffer, and a checkpoint reads them from there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.dag.messages import ReplicasOpen, SavesStep, UpdateSent, UpdateWanted
from megarl.dag.stage import Role
from megarl.dag.staleness import policy_of
from megarl.data.batch import Batch
from megarl.disaggregated.as_ready_checkpoint import BufferedGroups, files_of_flow, read_buffered_groups
from megarl.disaggregated.call_batcher import CallBatcher
from megarl.disaggregated.rollout_team import evaluate_last, evaluate_step, post_loader_place
from megarl.rollout.families import family_of
from megarl.runtime.generation import publish
from megarl.runtime.resume_compatibility import buffered_entry
from megarl.runtime.samples import groups_of_prompts, open_groups, samples_of
from megarl.runtime.stages import sampling
from megarl.runtime.stages.reward import is_scored
from megarl.runtime.stages.rollout import record_samples, refuse_broken_logprobs, with_experts
from megarl.runtime.validate import validates
from megarl.system.metrics import Metrics
from megarl.system.tracing import phase, set_step
from megarl.training.checkpoint import read_state

if TYPE_CHECKING:
    from megarl.dag.executor import Executor
    from megarl.data.trajectory import Trajectory
    from megarl.disaggregated.buffer.channel import FinishedGroups, GroupChannel
    from megarl.rollout.groups import GroupGenerator
    from megarl.runtime.checkpoint_part import CheckpointPart
    from megarl.runtime.rank_state import RankState
    from megarl.runtime.recorder import Recorder

_LOOK_S = 0.1  # seconds between two checks whether a weight update is requested, or rewards have arrived


def find_buffered_groups(source: Path) -> BufferedGroups | None:
    """Return a checkpoint's groups on which no step was trained; None: the checkpoint has no such groups."""
    saved = buffered_entry(read_state(source))
    return None if saved is None else read_buffered_groups(source, saved["parts"])


@dataclass(frozen=True)
class PendingGroups:
    """Generated groups whose rewards are still being computed."""

    numbers: list[int]  # numbers of the groups' prompts
    batch: Batch  # samples of the groups
    metrics: Metrics  # metrics of these samples so far
    aside: dict[str, Batch]  # fields for other teams (`GroupChannel.aside`)


@dataclass
class AsReadyLoop:
    """Generates groups until the weights of the last step have arrived. All ranks of a replica make the same calls.

    Attributes:
        executor: runs this team's nodes after generation, up to the first node that waits for rewards.
        scored: runs the remaining nodes.
        restored: groups of a checkpoint that are not in the buffer yet; None: there are none.
    """

    c: RankState
    executor: Executor
    scored: Executor
    channel: GroupChannel
    recorder: Recorder
    checkpoints: CheckpointPart
    restored: BufferedGroups | None
    _update_number: int = 1  # number of the next weight update; metrics with number 0 are from before the first step
    _drained: bool = False  # no further group may begin with the current weights
    _checked_s: float = 0.0  # time of the last check whether a weight update is requested
    _wanted: bool = False  # a weight update is requested
    _prompts: dict[int, Batch] = field(default_factory=dict)  # prompts of groups in flight, by number
    # weight version that generated the first tokens of each unfinished group, by the number of its prompt
    _versions: dict[int, int] = field(default_factory=dict)
    _waiting: list[int] = field(default_factory=list)  # numbers of prompts to begin as soon as the engine has room
    _partials: dict[int, list[Trajectory]] = field(default_factory=dict)  # partial trajectories of waiting prompts
    _scoring: deque[PendingGroups] = field(default_factory=deque)  # oldest first; rewards arrive in this order
    _carried: Metrics = field(default_factory=Metrics)  # metrics of rejected samples, added to the next accepted group
    _rejected: list[list[float]] = field(default_factory=list)  # scores of groups rejected since the last accepted one
    _batcher: CallBatcher = field(init=False)
    _unreported: int = 0  # number of finished groups that were not reported to the buffer yet
    _unsent: list[FinishedGroups] = field(default_factory=list)  # accepted groups to report, if this rank sends them
    _refused: list[int] = field(default_factory=list)  # numbers of rejected groups to report

    def run(self) -> None:
        """Generate until the weights of the last step have arrived."""
        c = self.c
        version = c.context.step
        generator = self._make_groups()
        try:
            self._open()
            self.recorder.start_step(version + 1)
            while version < c.config.trainer.steps:
                set_step(version + 1)
                with phase("step"):
                    self._generate(generator, version)
                    version = self._update_weights()
                    if validates(c.config, version):
                        evaluate_step(c, self.recorder, version)
                    else:
                        evaluate_last(c, self.recorder, version)
                self._save(version, generator)
        finally:
            generator.close()

    # -- begin -------------------------------------------------------------------------------------------------------

    def _make_groups(self) -> GroupGenerator:
        c, config = self.c, self.c.config
        sampling = config.rollout.sampling
        # An equal share of the capacity: more would leave other replicas too few groups.
        fair = -(-policy_of(config).capacity // c.layout.dp_size)
        most = family_of(config).most_in_flight(config, c.layout.dp_size)
        groups = fair if most is None else min(max(1, most // sampling.n), fair)
        self._batcher = CallBatcher(groups, fair)
        return open_groups(c.context, c.rollout, sampling, groups * sampling.n, training=True)

    def _open(self) -> None:
        """Open the buffer's flow of groups at the loader's next prompt; hand over a checkpoint's finished groups."""
        c, buffer, restored = self.c, self.c.buffer, self.restored
        assert c.loader is not None, "checks refuse a training run without data"
        late = None
        if c.layout.rank == 0:
            begun = {} if restored is None else restored.versions
            again = [] if restored is None else restored.again
            late = buffer.open_flow(c.context.step, c.loader.number, begun, again)
            if late:
                print(f"generating {len(late)} groups of the checkpoint again: too old for the current settings")
        late = c.layout.world.broadcast_json(late)
        if restored is None:
            return
        if c.layout.rank == 0:
            self._carried = restored.carried
        numbers = restored.share_of(c.layout.dp_rank, c.layout.dp_size, without=late)
        if c.layout.is_lead:
            for ready in restored.finished_of(numbers, c.team.placement.given_by(c.team.plan.name)):
                self.channel.swap(c.context, [ready], [], c.context.step, 0)
        self._waiting = [number for number in numbers if number not in restored.finished]
        self._versions = {number: restored.versions[number] for number in self._waiting}
        # Only groups that are young enough and have n partial trajectories continue; the others start over.
        n, partials = c.config.rollout.sampling.n, restored.partials
        self._partials = {number: partials[number] for number in self._waiting if len(partials.get(number, ())) == n}
        self.restored = None  # free the memory: the buffer has these samples now

    # -- one segment -------------------------------------------------------------------------------------------------

    def _generate(self, generator: GroupGenerator, version: int) -> None:
        """Generate with `version` until a weight update is due."""
        c, interrupts = self.c, self.c.config.async_.partial
        self._batcher.begin(time.monotonic())
        with c.rollout.generating(c.context, 0):
            generator.open()
            while True:
                self._admit(generator, version)
                # exchanged by this replica's ranks only, because each replica begins and ends segments at its own time
                self._wanted = bool(c.layout.mp_group.broadcast_json(self._check_wanted()))
                generating, scoring = generator.busy, bool(self._scoring)
                if not (generating or scoring) or (interrupts and self._wanted):
                    break
                # On servers, call `wait` even if nothing is in flight: it joins meetings of all replicas, which would
                # time out if this replica first waited for rewards.
                looks = generating or generator.is_async
                if looks:
                    with phase("rollout"):
                        groups = generator.wait(self._is_called)
                    if groups:
                        self._score(groups)
                if looks and not generating and not self._next_is_scored():
                    time.sleep(_LOOK_S)
                self._finish_scored(least=0 if looks else 1)
            generator.interrupt()
        self._swap(version, 0)

    def _admit(self, generator: GroupGenerator, version: int) -> None:
        """Begin groups while there is room; call the buffer when a call is due."""
        room, most = 0, 0
        if not self._wanted:
            self._begin_waiting(generator)
            room = generator.free // self.c.config.rollout.sampling.n
            most = self._batcher.missing(room, len(self._waiting))
        if self._drained:  # no further group may begin with these weights, except in place of a rejected one
            most = min(most, len(self._refused))
        idle = not generator.busy and not self._next_is_scored()
        if self._is_due(most, empty=idle or min(room, most) > 0):
            self._swap(version, most)
            if not self._wanted:
                self._begin_waiting(generator)

    def _begin_waiting(self, generator: GroupGenerator) -> None:
        while self._waiting and generator.free >= self.c.config.rollout.sampling.n:
            self._begin(generator, self._waiting.pop(0))

    def _is_due(self, most: int, *, empty: bool = False) -> bool:
        """Return whether to call the buffer now, to hand over finished groups and request up to `most` prompts.
        Collective over the replica."""
        if not (most or self._unreported):
            return False
        lead, finished = self.c.layout.is_lead, self._unreported > 0
        due = self._batcher.is_due(time.monotonic(), most, finished=finished, empty=empty) if lead else None
        return bool(self.c.layout.mp_group.broadcast_json(due))

    def _swap(self, version: int, most: int) -> None:
        """Hand over finished groups to the buffer, and request up to `most` prompts. Collective over the replica."""
        if not (most or self._unreported):
            return
        c, numbers = self.c, None
        with phase("give"):
            if c.layout.is_lead:
                numbers = self.channel.swap(c.context, self._unsent, self._refused, version, most)
            numbers = c.layout.mp_group.broadcast_json(numbers)
        self._batcher.called()
        self._drained = len(numbers) < most or (self._drained and len(self._refused) == most)
        self._unreported, self._unsent, self._refused = 0, [], []
        self._versions |= dict.fromkeys(numbers, version)
        self._waiting += numbers
        if c.loader is not None:
            c.loader.prepare(numbers)

    def _begin(self, generator: GroupGenerator, number: int) -> None:
        c = self.c
        assert c.loader is not None, "the buffer returned numbers of prompts"
        self._prompts[number] = prompt = c.loader.at(number)
        [group] = groups_of_prompts(c.context, prompt, c.config.rollout.sampling.n, [number])
        again = generator.add(group, self._partials.pop(number, None))
        if again and c.layout.is_lead:
            why = "exceed the current limits or come from another environment"
            print(f"group {group.uid}: restarting {again} of its samples, which {why}")

    def _is_called(self) -> bool:
        """Return whether to pause generation for rewards, a buffer call or new weights. Collective over the replica."""
        group = self.c.layout.mp_group
        if self._next_is_scored() or self._is_due(0):
            return True
        if not self.c.config.async_.partial:
            return False
        if not self._wanted:
            self._wanted = group.broadcast_json(self._check_wanted() if group.rank == 0 else None)
        return self._wanted

    def _check_wanted(self) -> bool:
        """Return whether the actor's team has requested a weight update; only a replica's first rank checks."""
        now = time.monotonic()
        if self._wanted or not self.c.layout.is_lead or now - self._checked_s < _LOOK_S:
            return self._wanted
        self._checked_s = now
        return self.c.buffer.has_arrived(UpdateWanted.name_of(self._update_number))

    def _score(self, groups: Sequence[tuple[int, list[Trajectory]]]) -> None:
        """Turn generated groups into samples, and run this team's nodes up to the first that waits for rewards."""
        c, numbers = self.c, [number for number, _ in groups]
        with self._measuring(Metrics()) as metrics:
            prompts = Batch.concat([self._prompts.pop(number) for number in numbers])
            batch = samples_of(
                c.rollout, prompts, [trajectories for _, trajectories in groups], c.config.rollout.sampling
            )
            refuse_broken_logprobs(batch)
            record_samples(c.context, batch)
            batch = with_experts(c.context, c.rollout, batch)
            self.channel.give(c.context, self.executor.graph[c.team.plan.nodes[0]], batch)
            batch = self.executor.run(c.context, batch)
        self._scoring.append(PendingGroups(numbers, batch, metrics, self.channel.aside))
        self.channel.aside = {}

    @contextmanager
    def _measuring(self, metrics: Metrics) -> Iterator[Metrics]:
        """Record metrics into `metrics` within the block, instead of into the step's metrics."""
        context = self.c.context
        outer, context.metrics = context.metrics, metrics
        try:
            yield metrics
        finally:
            context.metrics = outer

    def _next_is_scored(self) -> bool:
        """Return whether the rewards of the oldest pending groups have arrived. Collective over the replica."""
        if not self._scoring:
            return False
        lead = self.c.layout.is_lead
        return bool(self.c.layout.mp_group.broadcast_json(is_scored(self._scoring[0].batch) if lead else None))

    def _finish_scored(self, *, least: int) -> None:
        """Finish the `PendingGroups` whose rewards have arrived; wait until at least `least` of them are finished."""
        while self._scoring and (least > 0 or self._next_is_scored()):
            self._finish(self._scoring.popleft())
            least -= 1

    def _finish(self, groups: PendingGroups) -> None:
        """Run the remaining nodes on scored groups, and queue the accepted groups for handover with their metrics."""
        c, numbers = self.c, groups.numbers
        self.channel.aside = groups.aside
        with self._measuring(self._carried.merge(groups.metrics)):
            batch = self.scored.run(c.context, groups.batch)
            rejected = self._rejected_groups(numbers, batch)
        ready = self.channel.collect(numbers, batch, self._carried)
        wanted = [number for number in numbers if number not in rejected]
        for number in numbers:
            del self._versions[number]
        self._unreported += len(numbers)
        self._refused += sorted(rejected)  # other groups may begin in their place
        if not wanted:
            return  # all groups are rejected: `_carried` keeps their metrics for the next accepted group
        self._carried = Metrics()
        if ready is not None:
            self._unsent.append(replace(ready.select(wanted), metrics=ready.metrics) if rejected else ready)

    def _rejected_groups(self, numbers: Sequence[int], batch: Batch) -> set[int]:
        """Return the numbers of the groups that dynamic sampling or `algorithm.filter` rejects.

        Raises:
            NoSignalError: `max_rounds` * `data.batch_size` groups in a row were rejected.
        """
        config, scores = self.c.config, list[list[float]]()
        required = sampling.group_condition(config)
        if required is None:
            return set()
        admitted = sampling.admitted(self.c.context, batch, scores)
        if any(admitted):
            self._rejected = []
        self._rejected += [group for group, is_admitted in zip(scores, admitted, strict=True) if not is_admitted]
        if len(self._rejected) >= config.algorithm.dynamic_sampling.max_rounds * config.data.batch_size:
            problem = f"replica {self.c.layout.dp_rank}: none of its last {len(self._rejected)} groups has {required}"
            others = "loosen algorithm.filter, " if config.filter_admits else ""
            raise sampling.no_signal(problem, "these groups", self._rejected, others)
        return {number for number, is_admitted in zip(numbers, admitted, strict=True) if not is_admitted}

    # -- between two segments ----------------------------------------------------------------------------------------

    def _update_weights(self) -> int:
        """Report that this replica is ready, receive the new weights, and return their version."""
        c, number = self.c, self._update_number
        with phase("await_weights", waits_for=c.team.of(Role.ACTOR)):
            if c.layout.is_lead:
                is_open = ReplicasOpen(number)
                c.buffer.arrive(is_open.name, is_open.encode())
            version = UpdateSent.read_together(c.mail, number).version
        publish(c, version)
        c.context.step = version
        self.recorder.end_step(number)  # metrics of the segment that ends here
        self.recorder.start_step(version + 1)
        self._update_number, self._drained, self._wanted = number + 1, False, False
        return version

    def _save(self, version: int, generator: GroupGenerator) -> None:
        """Write this team's part of the checkpoint of step `version`, if one is due."""
        c = self.c
        if not SavesStep.read_together(c.mail, version).saves:
            self.checkpoints.poll()
            return
        self._finish_scored(least=len(self._scoring))
        self._swap(version, 0)
        assert c.loader is not None, "checks refuse a training run without data"
        # Set the loader to the first prompt whose group has not begun. No group begins before the next segment.
        c.loader.go_to(c.buffer.flow_state()["next"])
        post_loader_place(c)
        partials = generator.partial() | self._partials

        def files() -> dict[str, bytes]:
            c.layout.world.barrier()  # wait until every replica has handed over its finished groups
            return files_of_flow(c, version, self._versions, partials, self._carried)

        self.checkpoints.write_part(version, last=version == c.config.trainer.steps, files=files)
