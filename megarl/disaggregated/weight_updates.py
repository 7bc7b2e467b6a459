"""When the actor's team gives its weights to a rollout in a team of its own, in order and as ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl.dag.stage import Role
from megarl.disaggregated.as_ready_loop import GATE, OPEN, SAVES, WANTED
from megarl.disaggregated.buffer.core import FORMED
from megarl.disaggregated.generation import publish
from megarl.disaggregated.in_order_loop import DRAWN, store_of
from megarl.models.copies import ParameterCopies
from megarl.runtime.validate import validates
from megarl.staleness import policy_of
from megarl.tracing import phase

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.runtime.rank_state import RankState


class InOrderUpdates:
    """The actor's end: weights go to where samples are drawn, version by version. Collective over the actor's team.

    With k > 1 the rollout's team may still draw with the version before when a new one is there. Then training goes on,
    and a copy of the new one waits in host memory until its turn has come; there are k copies at most.

    Args:
        c: this rank's state.
    """

    def __init__(self, c: RankState) -> None:
        self._c, self._policy = c, policy_of(c.config)
        self._waiting: deque[tuple[int, list[Tensor]]] = deque()

    def before_step(self, step: int) -> None:
        """Push what waits and may go by now, and what waits until `step` is drawn.

        Training of `step` needs its samples anyway. Where drawing takes longer than training, the rollout's team would
        else have nothing to do while `step` is trained.
        """
        self._push_waiting(lambda version: self._policy.weights_must_go(version - 1, step))

    def after_step(self, version: int, *, saves: bool) -> None:
        """Send the weights after step `version`, which are those of now; `saves`: a checkpoint of it may be written."""
        validated = validates(self._c.config, version)
        now = saves or validated or self._policy.weights_must_go(version - 1, version + 1)
        none_waits = self._push_waiting(lambda _: now)
        if not self._policy.samples_with(version, validates=validated):
            return
        if none_waits and self._may_go(version, wait=now):
            publish(self._c, version)
        else:
            self._waiting.append((version, ParameterCopies(self._c.actor.chunks).take()))

    def _push_waiting(self, must_go: Callable[[int], bool]) -> bool:
        """Push versions that wait, as far as they may go, and wait for those that `must_go`; are there none left?"""
        while self._waiting:
            version, values = self._waiting[0]
            if not self._may_go(version, wait=must_go(version)):
                return False
            with ParameterCopies(self._c.actor.chunks).replaced(values):
                publish(self._c, version)
            self._waiting.popleft()
        return True

    def _may_go(self, version: int, *, wait: bool) -> bool:
        """Say whether nothing is sampled any more with the weights that `version` replaces; `wait` until it is so.

        Without staleness `version` is trained on all samples of the weights before it.
        """
        c, step = self._c, self._policy.last_step(version - 1)
        if not self._policy.max_staleness:
            return True
        team = c.team.placement.of_role(Role.ROLLOUT)
        assert team is not None, "every run draws samples"
        if wait:
            with phase("await_drawn", waits_for=team.name):
                c.mail.read(f"{DRAWN}/{step}")
            return True
        found = store_of(c).peek(f"{DRAWN}/{step}") is not None if c.layout.rank == 0 else None
        return bool(c.layout.world.broadcast_json(found))


class AsReadyUpdates:
    """The actor's end of the gates (see `as_ready_loop`) at which a rollout's team takes weights. Collective.

    Args:
        c: this rank's state.
    """

    def __init__(self, c: RankState) -> None:
        self._c, self._gate, self._version, self._policy = c, 1, c.context.step, policy_of(c.config)
        team = c.team.placement.of_role(Role.ROLLOUT)
        assert team is not None, "every run draws samples"
        self._team = team
        self._told: list[int] = []

    def before_step(self, step: int) -> None:
        """Wait for the samples of `step`; where all that may be drawn is drawn by then, the weights go now."""
        c = self._c
        if self._policy.partial:
            return
        given = c.team.placement.given_by(self._team.name)[0]
        with phase("take"), phase("wait", waits_for=self._team.name):
            store_of(c).assignment(step, given.samples, c.layout.dp_rank)
        if self._version < step - 1 and self._is_open():
            self._push(step - 1)

    def after_step(self, step: int, *, saves: bool) -> None:
        """Send the weights after `step` where they have to go, or where the rollout's team is ready for them.

        Args:
            step: that has been trained.
            saves: a checkpoint of it may be written.
        """
        c = self._c
        if c.layout.rank == 0:
            c.mail.post(f"{SAVES}/{step}", saves)
        if saves or validates(c.config, step) or self._policy.weights_must_go(self._version, step + 1):
            if c.layout.rank == 0:
                c.mail.post(f"{WANTED}/{self._gate}", step)
            self._await_open()
            self._push(step)
        elif self._is_open():
            self._push(step)

    def _is_open(self) -> bool:
        """No replica draws. Collective.

        The samples of a step may be the last ones that a replica put before it opens the gate: it is a matter of
        milliseconds then, and without waiting for them it would have nothing to do for a step of training.
        """
        world, store = self._c.layout.world, store_of(self._c)
        found = bool(world.broadcast_json(store.drained(self._version) if world.rank == 0 else None))
        if found:
            self._await_open()
        return found

    def _await_open(self) -> None:
        with phase("await_drawn", waits_for=self._team.name):
            self._c.mail.read(f"{OPEN}/{self._gate}")

    def _push(self, version: int) -> None:
        c = self._c
        if c.layout.rank == 0:
            c.mail.post(f"{GATE}/{self._gate}", version)
        publish(c, version)
        self._told.append(self._gate)
        self._gate, self._version = self._gate + 1, version

    def metrics(self, step: int) -> list[dict[str, Any]]:
        """Of the samples of `step`, and of the stretches of the rollout's team that have ended in it."""
        c, told = self._c, self._told
        self._told = []
        found = [c.mail.read(f"metrics/{self._team.name}/{gate}") for gate in told]
        return found + c.team.read(f"{FORMED}/{step}")["metrics"]
