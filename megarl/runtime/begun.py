"""Where the rollout's team goes on that begins again in a run that is under way, in order.

    store                                           new processes of the team
    metrics/draw/6, drawn/7                  --->   step 7 is drawn, and not complete
    samples of steps 6 and 7                 --->   its part of the checkpoint of step 5, if that is not written
                                             <---   engines: whoever waits for this team pushes weights

Before it tells where its engines are it does what takes no weights. The actor's team may wait for that, and goes on.
After that it posts nothing before it has weights (megarl.runtime.rollout_again says why).

Versions come in their order, and one replaces another when all is drawn with that. So what the team drew with is what
the actor's team pushed last; or it has come before that, and nothing is left to be drawn with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.metrics import Metrics
from megarl.runtime.ahead import is_drawn_with, may_save
from megarl.runtime.drawn import files_ahead
from megarl.runtime.rollout_again import DRAWN
from megarl.runtime.rollout_team import LOADER, VALIDATION, WEIGHTS
from megarl.runtime.validate import validates
from megarl.store.core import KEPT, StoreError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.runtime.checkpoint_part import CheckpointPart
    from megarl.runtime.controller import Controller
    from megarl.store.client import StoreClient


@dataclass(frozen=True)
class Begun:
    """Where the rollout's team goes on.

    Attributes:
        first: the step that the run began after.
        step: that is not complete; one more than the last one of the run: all of them are.
        drawn: what each replica measured of drawing it; None: not all of it is drawn.
        followed: it is through with this version of the weights and those before, as far as they concern it.
        version: of the weights that it needs first; None: of none any more, and nobody pushes.
    """

    first: int
    step: int
    drawn: list[Metrics] | None
    followed: int
    version: int | None

    @property
    def draws_first(self) -> bool:
        """It begins before the first step is drawn."""
        return self.step == self.first + 1 and self.drawn is None

    def is_past_checkpoint(self, config: RunConfig) -> bool:
        """It has given all that the checkpoint had that the run went on from, which may be gone."""
        return self.step > self.first + 1 + config.async_.max_staleness

    @property
    def saved(self) -> int:
        """The last version that its part of checkpoints is complete of before it has weights."""
        return min(self.followed, self.step - 1)

    @classmethod
    def at(
        cls, config: RunConfig, first: int, step: int, drawn: list[Metrics] | None, used: Callable[[int], bool]
    ) -> Begun:
        """At the first step of which it has not told its numbers.

        Args:
            config, first, step, drawn: see the class.
            used: of a version after which nothing more is drawn: it has done with it what is to be done.
        """
        steps, lag = config.trainer.steps, config.async_.max_staleness
        followed = max(first, step - 1 - lag)
        if drawn is None and (step <= steps or step == first + 1):
            return cls(first, step, None, followed, followed)
        if step < steps:  # the next step is drawn with this one
            return cls(first, step, drawn, followed, max(first, step - lag))
        while followed < steps and (not is_drawn_with(config, followed + 1) or used(followed + 1)):
            followed += 1
        later = (version for version in range(followed + 1, steps + 1) if is_drawn_with(config, version))
        return cls(first, step, drawn, followed, next(later, None))


def find_begun(c: Controller) -> Begun:
    """The first step after that which the run began with that the rollout's team has not told its numbers of.

    Collective over the rollout's team.
    """
    store, team, config, first = store_of(c), c.team.plan, c.config, c.context.step
    found: list[Any] = []
    if c.layout.rank == 0:
        step = first_missing(lambda one: is_there(store, f"metrics/{team.name}/{one}"), first + 1)
        drawn = None
        if is_there(store, f"{DRAWN}/{step}"):  # else the actor's team waits for that: it pushes nothing newer before
            drawn = [store.peek(f"{DRAWN}/{replica}/{step}") for replica in range(team.replicas)]
        last = range(max(first + 1, config.trainer.steps - config.async_.max_staleness), config.trainer.steps + 1)
        used = [version for version in last if _is_used(c, version)]
        found = [step, drawn, used]
    step, told, used = c.layout.world.broadcast_json(found)
    drawn = None if told is None else [Metrics.from_json(one) for one in told]
    return Begun.at(config, first, step, drawn, used.__contains__)


def _is_used(c: Controller, version: int) -> bool:
    """It has been validated, or, where it is not, the last one has been pushed."""
    if validates(c.config, version):
        return is_there(store_of(c), f"{VALIDATION}/{version}")
    lives = range(c.team.restarts)
    return any(is_there(store_of(c), f"{WEIGHTS}/{number}/{version}") for number in lives)


def go_on(c: Controller, begun: Begun, checkpoints: CheckpointPart) -> None:
    """Bring this team to where it was, as far as it needs no weights. Collective over it."""
    assert c.loader is not None, "checks refuse a training run without data"
    _complete(c, begun, checkpoints)
    for step in range(max(begun.first, c.team.finished) + 1, begun.step):
        store_of(c).done(step)  # its workers were, and that was forgotten with them
    if begun.step - 1 > c.context.step:
        c.context.step = begun.step - 1
        c.loader.load_state_dict(c.mail.read(f"{LOADER}/{c.context.step}"))


def _complete(c: Controller, begun: Begun, checkpoints: CheckpointPart) -> None:
    """The newest one may not have been written. At the end of the run it may be several, not even begun: the actor's
    team waits for them, and pushes nothing before.
    """
    config, first = c.config, begun.first
    before = begun.step - 1 - config.async_.max_staleness
    for version in reversed(range(max(first + 1, before - KEPT // 2), before + 1)):
        if may_save(config, version) and checkpoints.complete(version, partial(_files, c, version)):
            break  # those before it were complete when it was begun
    for version in range(max(first, before) + 1, begun.saved + 1):
        if may_save(config, version):
            checkpoints.complete(version, partial(_files, c, version))


def _files(c: Controller, version: int) -> dict[str, bytes]:
    """What this rank adds to its team's part of a checkpoint; nothing where it has begun a later one: it is written."""
    store = store_of(c)
    if is_there(store, f"checkpoint/{c.team.plan.name}/{version}"):  # others go on, and free what they are done with
        return store.left(version)
    return files_ahead(c, version, [])


def first_missing(known: Callable[[int], bool], first: int) -> int:
    """The first number from `first` on that is not there, of numbers that come in their order.

    >>> first_missing(lambda number: number < 1000, 3)
    1000
    """
    reach = 1
    while known(first + reach - 1):
        reach *= 2
    low, high = first + reach // 2, first + reach - 1  # all below `low` are there, `high` is not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if known(middle) else (low, middle)
    return low


def is_there(store: StoreClient, name: str) -> bool:
    """Somebody has posted it; of a long series only the last ones are kept."""
    try:
        return store.peek(name) is not None
    except StoreError:
        return True


def store_of(c: Controller) -> StoreClient:
    """What this team and the others exchange goes through it."""
    assert c.team.store is not None, "there are other teams"
    return c.team.store
