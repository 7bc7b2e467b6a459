"""The actor's end of the gates at which a rollout's team takes weights, where samples go to training as they get ready
(megarl.disaggregated.as_ready_loop)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.dag.stage import Role
from megarl.disaggregated.as_ready_loop import GATE, OPEN, SAVES, WANTED
from megarl.disaggregated.buffer.core import FORMED
from megarl.disaggregated.in_order_loop import store_of
from megarl.runtime.generation import publish
from megarl.runtime.validate import validates
from megarl.tracing import phase

if TYPE_CHECKING:
    from megarl.runtime.controller import Controller


class Offers:
    """The actor's end of the gates: when the weights go to the rollout's team. Collective over the actor's team.

    Args:
        c: this rank's controller.
    """

    def __init__(self, c: Controller) -> None:
        self._c, self._gate, self._version = c, 1, c.context.step
        team = c.team.placement.of_role(Role.ROLLOUT)
        assert team is not None, "every run draws samples"
        self._team = team
        self._told: list[int] = []

    def before_step(self, step: int) -> None:
        """Wait for the samples of `step`; where all that may be drawn is drawn by then, the weights go now."""
        c = self._c
        if c.config.async_.partial:
            return
        given = c.team.placement.given_by(self._team.name)[0]
        with phase("take"), phase("wait", waits_for=self._team.name):
            store_of(c).assignment(step, given.samples, c.layout.dp_rank)
        if self._version < step - 1 and self._is_open():
            self._push(step - 1)

    def after_step(self, step: int, *, saves: bool) -> None:
        """The weights after `step` go where they have to, or where the gate is open.

        Args:
            step: that has been trained.
            saves: a checkpoint of it may be written.
        """
        c = self._c
        if c.layout.rank == 0:
            c.mail.post(f"{SAVES}/{step}", saves)
        if saves or self._must(step):
            if c.layout.rank == 0:
                c.mail.post(f"{WANTED}/{self._gate}", step)
            self._await_open()
            self._push(step)
        elif self._is_open():
            self._push(step)

    def _must(self, step: int) -> bool:
        config = self._c.config
        too_old = step - self._version > config.async_.max_staleness
        return config.async_.partial or too_old or validates(config, step)

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
