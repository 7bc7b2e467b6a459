"""When the actor's team sends its weights to the rollout team, for `async.order` in_order and as_ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.dag.messages import (
    MetricsJson,
    ReplicasOpen,
    SavesStep,
    StepFormed,
    StepGenerated,
    StepMetrics,
    UpdateSent,
    UpdateWanted,
)
from megarl.dag.stage import Role
from megarl.dag.staleness import policy_of
from megarl.models.copies import ParameterCopies
from megarl.runtime.generation import publish
from megarl.runtime.policies import policy_models
from megarl.runtime.validate import may_be_last, validates
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.models.policy import PolicyModel
    from megarl.runtime.rank_state import RankState


class WeightUpdates:
    """The base class, which sends no weights; teams without the actor use it."""

    def before_step(self, step: int) -> None:
        """Send the weights that must be sent before `step` is trained."""

    def after_step(self, step: int, *, saves: Callable[[int], bool]) -> None:
        """Send the weights of `step`, or queue them; `saves(step)`: whether a checkpoint of a step may be written."""


def generates_with(c: RankState) -> list[PolicyModel]:
    """Return the pipeline chunks of those models in this team with which the rollout generates: the actor, and models
    of policies that have weights of their own."""
    return [chunk for name in policy_models(c.config) if name in c.models for chunk in c.models[name].chunks]


class InOrderUpdates(WeightUpdates):
    """Sends every version of the weights to the rollout in order (`async.order=in_order`). Collective over a team that
    trains the actor, or another policy's model.

    With `async.max_staleness` > 1 the rollout team may still generate with an older version. Then training continues,
    and a copy of the new weights waits in host memory; there are at most `async.max_staleness` copies.
    """

    def __init__(self, c: RankState) -> None:
        self._c, self._policy = c, policy_of(c.config)
        self._waiting: deque[tuple[int, list[Tensor]]] = deque()

    def before_step(self, step: int) -> None:
        """Send the queued versions that the rollout team can accept by the time it has generated `step`.

        Training waits for the samples of `step` anyway. If the weights were sent after training instead, a rollout team
        that is slower than training would be idle while `step` is trained.
        """
        self._push_waiting(lambda version: self._policy.weights_must_go(version - 1, step))

    def after_step(self, step: int, *, saves: Callable[[int], bool]) -> None:
        """Send or queue the current weights, which are version `step`; see `WeightUpdates`."""
        version, validated = step, validates(self._c.config, step)
        now = validated or self._policy.weights_must_go(version - 1, version + 1) or saves(step)
        none_waits = self._push_waiting(lambda _: now)
        if not self._policy.samples_with(version, validates=validated or may_be_last(self._c.config, version)):
            return  # no samples will be generated with this version
        if none_waits and self._may_go(version, wait=now):
            publish(self._c, version)
        else:
            self._waiting.append((version, ParameterCopies(generates_with(self._c)).take()))

    def _push_waiting(self, must_go: Callable[[int], bool]) -> bool:
        """Send queued versions in order while the rollout team accepts them; return whether the queue is empty.

        For versions that `must_go`, wait until the rollout team accepts them.
        """
        while self._waiting:
            version, values = self._waiting[0]
            if not self._may_go(version, wait=must_go(version)):
                return False
            with ParameterCopies(generates_with(self._c)).replaced(values):
                publish(self._c, version)
            self._waiting.popleft()
        return True

    def _may_go(self, version: int, *, wait: bool) -> bool:
        """Return whether the rollout team has finished generating with `version` - 1; with `wait`, wait until it has.

        With `async.max_staleness=0` it has always finished: training needed all samples of `version` - 1.
        """
        c, step = self._c, self._policy.last_step(version - 1)
        if not self._policy.max_staleness:
            return True
        if wait:
            with phase("await_generation", waits_for=c.team.of(Role.ROLLOUT)):
                StepGenerated.read_together(c.mail, step)
            return True
        generated = c.buffer.is_posted(StepGenerated.name_of(step)) if c.layout.rank == 0 else None
        return bool(c.layout.world.broadcast_json(generated))


class AsReadyUpdates(WeightUpdates):
    """Sends the newest weights when the rollout team is ready (as_ready_loop.py). Collective over the actor's team."""

    def __init__(self, c: RankState) -> None:
        self._c, self._update_number, self._version, self._policy = c, 1, c.context.step, policy_of(c.config)
        self._team = c.team.of(Role.ROLLOUT)
        self._ended: list[int] = []  # numbers of the weight updates sent in this step

    def before_step(self, step: int) -> None:
        """Wait for the samples of `step`; then send the newest weights if all replicas have finished generating.

        With `async.partial` do nothing.
        """
        c = self._c
        if self._policy.partial:
            return
        given = c.team.placement.given_by(self._team)[0]
        with phase("take"), phase("wait", waits_for=self._team):
            c.buffer.assignment(step, given.samples, c.layout.dp_rank)
        if self._version < step - 1 and self._is_open():
            self._push(step - 1)

    def after_step(self, step: int, *, saves: Callable[[int], bool]) -> None:
        """Send the weights of `step` if they are due, or if all replicas have finished generating."""
        c, saved = self._c, saves(step)
        if c.layout.rank == 0:
            SavesStep(step, saved).post(c.mail)
        if saved or validates(c.config, step) or self._policy.weights_must_go(self._version, step + 1):
            if c.layout.rank == 0:
                UpdateWanted(self._update_number).post(c.mail)
            self._await_open()
            self._push(step)
        elif self._is_open():
            self._push(step)

    def _is_open(self) -> bool:
        """Return whether all replicas have finished generating with the current weights. Collective.

        If they have, wait the milliseconds until they accept new weights: otherwise they would be idle for a whole
        training step.
        """
        world, buffer = self._c.layout.world, self._c.buffer
        drained = bool(world.broadcast_json(buffer.drained(self._version) if world.rank == 0 else None))
        if drained:
            self._await_open()
        return drained

    def _await_open(self) -> None:
        with phase("await_generation", waits_for=self._team):
            ReplicasOpen.read_together(self._c.mail, self._update_number)

    def _push(self, version: int) -> None:
        c = self._c
        if c.layout.rank == 0:
            UpdateSent(self._update_number, version).post(c.mail)
        publish(c, version)
        self._ended.append(self._update_number)
        self._update_number, self._version = self._update_number + 1, version

    def metrics(self, step: int) -> list[MetricsJson]:
        """Return the metrics that the rollout team sent: one entry for each segment, the time between two
        weight updates of the team, that ended during `step`, and one for the samples of `step`."""
        mail, ended, self._ended = self._c.mail, self._ended, []
        segments = [StepMetrics.read_together(mail, self._team, number).metrics for number in ended]
        return [*segments, StepFormed.read_together(mail, step).metrics]
