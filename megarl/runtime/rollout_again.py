"""The rollout's team begins again by itself while the run goes on: it is given weights, and draws the same samples.

    rollout's team, begun again (begun.py)            team of the actor
    engines/1: where its engines are   ------------>  looks for it while it waits for anything of this team
    takes them, draws with them        <--- weights/1/v ---  pushes version v once more, the one that it pushed last
    draws t again, if not all of it was drawn         waits on, for the same things as before

v is t - 1 - k until all samples of step t are drawn (`async.max_staleness` is k), so these are those of before: their
seeds are those of prompts, and the loader's place after every step is in the mail. With k = 0 the actor has learned
nothing since then; else it keeps a copy of what it pushed last. What was given or posted before the team died counts,
and what comes again is left out by the store. Where samples go to training as they get ready, no step is drawn again,
but groups that were not finished (flow_begun.py).

Every rank of the actor's team looks by itself, and all of them push together. They agree on when: what one of them
waits for is there before the engines' new addresses, so that who sees these asks for it once more; or it comes after
the weights, which no rank pushes by itself. Hence a team that begins again posts nothing that they wait for before it
has weights; and before it waits for a third team, which may itself wait for samples, a rank waits until these are
given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.dag.placement import begins_again
from megarl.dag.stage import Kind, Role
from megarl.errors import WorkerError
from megarl.models.copies import ParameterCopies
from megarl.phase import phase
from megarl.store.core import StoreError
from megarl.store.crossing import TeamCrossing

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.config.run import RunConfig
    from megarl.dag.node import Node
    from megarl.dag.placement import Placement
    from megarl.data.batch import Batch
    from megarl.runtime.controller import Controller
    from megarl.store.client import StoreClient
    from megarl.sync.updater import SyncReport

DRAWN = "drawn"
#: Mail that only the rollout's team posts; names of other series have its name.
_OWN = (DRAWN, "loader", "validation", "open")


def comes_again(config: RunConfig, placement: Placement) -> bool:
    """Whether the rollout has a team of its own that may begin again by itself."""
    team = placement.of_role(Role.ROLLOUT)
    return placement.separate and team is not None and begins_again(config, team)


@dataclass
class Drawer:
    """The rollout's team as the actor's sees it: it may begin again whenever it is waited for. Of every rank.

    It is the mail of this team: whoever waits for the rollout's looks after its engines meanwhile.

    Attributes:
        c: of this rank.
        number: of its engines: how often it has begun again.
    """

    c: Controller
    number: int = 0
    _pushed: list[Tensor] | None = None  # what it pushed last, where it may have learned since then
    _given: set[tuple[int, str]] = field(default_factory=set)

    @classmethod
    def of(cls, c: Controller) -> Drawer | None:
        """None: this team is not the actor's, or waits for no team that may begin again."""
        return cls(c) if c.team.leads and comes_again(c.config, c.team.placement) else None

    # -- mail ---------------------------------------------------------------------------------------------------------

    def post(self, name: str, value: Any) -> None:
        """See `megarl.training.together.Mail`."""
        self._store.post(name, value)

    def read(self, name: str) -> Any:
        """See there."""
        kind, *rest = name.split("/")
        if kind not in _OWN and self._name not in rest:
            return self._store.read(name)  # of a third team: it may come at any time
        with self._looking():
            return self._store.read(name)

    # -- samples ------------------------------------------------------------------------------------------------------

    def wait_for(self, step: int, keys: list[str], *, all_drawn: bool) -> None:
        """Until the rollout's team has given what these keys name, and with `all_drawn` has told that it is through."""
        left = [key for key in keys if (step, key) not in self._given]
        if not (left or all_drawn):
            return
        with phase("take"), phase("wait", waits_for=self._name), self._looking():
            for key in left:
                self._store.given(step, key)
                self._given.add((step, key))
            if all_drawn:
                self._store.read(f"{DRAWN}/{step}")
        self._given = {one for one in self._given if one[0] == step}

    # -- weights ------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to the engines when the run begins. Collective.

        Raises:
            WorkerError: they do not answer, and nobody has come in their place.
        """
        from megarl.runtime.rollout_team import connect_engines

        try:
            self.c.sync = connect_engines(self.c)
        except WorkerError as error:
            self._await_next("the engines of the rollout's team do not answer", str(error))

    def push(self, version: int) -> SyncReport:
        """Push the weights until the engines have taken them; a team that dies meanwhile is waited for. Collective.

        Raises:
            WorkerError: they did not take them, and nobody has come in their place.
        """
        if self.c.config.async_.max_staleness:
            self._pushed = None  # its memory, before it is taken again
            self._pushed = ParameterCopies(self.c.actor.chunks).take()
        return self._push(version)

    def _push(self, version: int) -> SyncReport:
        from megarl.runtime.rollout_team import announce_weights

        while (report := self.c.sync.push(version)).failed:
            why = "\n".join(text for _, text in sorted(report.failed.items()))
            self._await_next(f"the team of the rollout did not take version {version} of the weights", why)
        announce_weights(self.c, report)
        return report

    def _await_next(self, what: str, why: str) -> None:
        """Connect to the engines of the team that has begun again, as soon as it has."""
        from megarl.runtime.rollout_team import ENGINES, connect_engines
        from megarl.sync.updater import NullSync

        c = self.c
        if c.layout.rank == 0:
            print("\n".join([what, *filter(None, [why]), "its engines are given the weights again"]), flush=True)
        while True:
            try:
                with phase("await_engines", waits_for=self._name):
                    self._store.read(f"{ENGINES}/{self.number + 1}")
            except StoreError as error:
                raise WorkerError(f"{what}:\n{why}\nand it has not begun again: {error}") from error
            self.number += 1
            try:
                c.sync.close()
                c.sync = NullSync()
                c.sync = connect_engines(c)
                return
            except WorkerError as error:  # on all ranks: it died again
                why = str(error)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        with self._store.looking(self._look):
            yield

    def _look(self) -> Callable[[], None] | None:
        """Between two questions to the store: has it begun again? Then it needs weights."""
        from megarl.runtime.rollout_team import ENGINES
        from megarl.sync.updater import WeightSync

        sync = self.c.sync
        if not isinstance(sync, WeightSync) or sync.version is None:
            return None  # it has no weights yet, and is given them when the run begins
        there = self._store.peek(f"{ENGINES}/{self.number + 1}") is not None
        return partial(self._push_again, sync.version) if there else None

    def _push_again(self, version: int) -> None:
        self._await_next("the team of the rollout has begun again", "")
        with contextlib.ExitStack() as stack:
            if self._pushed is not None:
                stack.enter_context(ParameterCopies(self.c.actor.chunks).replaced(self._pushed))
            self._push(version)

    @property
    def _store(self) -> StoreClient:
        assert self.c.team.store is not None, "it is in another team"
        return self.c.team.store

    @property
    def _name(self) -> str:
        return self.c.team.of(Role.ROLLOUT)


class ActorsCrossing(TeamCrossing):
    """That of the actor's team. Before a node it waits for all that the rollout's team gives for it, at any remove.

    So no wait for a third team is one for samples that the rollout's team cannot draw before it has weights; and what
    the actor learns from is drawn to its end, with what the rollout's team measured.

    Args:
        drawer: the rollout's team.
        arguments, settings: see `TeamCrossing`.
    """

    def __init__(self, drawer: Drawer, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._drawer = drawer

    def take(self, context: Any, node: Node, board: Batch | None) -> Batch | None:
        """See `TeamCrossing.take`."""
        drawer = self._placement.of_role(Role.ROLLOUT)
        assert drawer is not None, "every run draws samples"
        learns, before = node.kind is Kind.MODEL_TRAIN, set(self._graph.upstream(node.id))
        keys = [one.key for one in self._placement.given_by(drawer.name) if learns or one.node in before]
        in_order = self._drawer.c.config.async_.order == "in_order"  # else samples bring what was measured of them
        self._drawer.wait_for(context.step, keys, all_drawn=learns and in_order)
        return super().take(context, node, board)
