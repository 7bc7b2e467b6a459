"""Where the rollout's team goes on that begins again in a run whose samples go to training as they get ready.

    store                                                     new processes of the team
    metrics/draw/6, gate/6 = v, no open/7            --->   version v is drawn with until gate 7
    metrics/draw/6, open/7, gate/7 = w               --->   gate 7 is passed with version w
    groups that are finished, prompts of the others  --->   its part of the checkpoint of step v, if that lacks
                                                     <---   engines: whoever waits for this team pushes weights

Groups that were under way are drawn again, which the store knows (`megarl.store.core.Core.restart_team`); finished ones
stay. As in order (megarl.runtime.begun), the team does what takes no weights before it tells where its engines are, and
posts nothing between that and its first weights.

The actor's team pushed version v last: it passes gate 7 only when all replicas have come there. When they have, it
needs nothing of this team before it passes it. So this team waits for that, and is given w first, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.metrics import Metrics
from megarl.phase import phase
from megarl.runtime.ahead import may_save
from megarl.runtime.begun import first_missing, is_there, store_of
from megarl.runtime.flow import GATE, OPEN, PLACE, tell_place
from megarl.runtime.flow_files import files_of_flow
from megarl.runtime.rollout_team import VALIDATION
from megarl.runtime.validate import validates
from megarl.store.core import KEPT

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.runtime.checkpoint_part import CheckpointPart
    from megarl.runtime.controller import Controller


@dataclass(frozen=True)
class FlowBegun:
    """Where the rollout's team goes on.

    Attributes:
        is_open: the store hands out prompts, and knows what a checkpoint had of them; groups of which nobody had put
            the samples by then are drawn again.
        draws_first: it has not told its numbers of before the first step.
        gate: of which it has not told them.
        passes: all replicas have come to it.
        owes: what follows a gate is to be done, after the numbers of this one, if it `passes`, else of the one before:
            validation, and its part of a checkpoint.
        version: of the weights that it needs first; None: of none any more, and nobody pushes.
    """

    is_open: bool
    draws_first: bool
    gate: int
    passes: bool
    owes: bool
    version: int | None

    def is_past_checkpoint(self, config: RunConfig) -> bool:
        """It needs nothing of the checkpoint that the run went on from, which may be gone."""
        return self.is_open


def find_flow_begun(c: Controller) -> FlowBegun:
    """The first gate of which the rollout's team has not told its numbers. Collective over the team."""
    store, team = store_of(c), c.team.plan
    found: list[int | bool] = []
    if c.layout.rank == 0:
        gate = first_missing(lambda one: is_there(store, f"metrics/{team.name}/{one}"), 1)
        passes = is_there(store, f"{OPEN}/{gate}")
        version = c.context.step if gate == 1 else int(store.read(f"{GATE}/{gate - 1}"))
        owes = gate > 1 and validates(c.config, version) and not is_there(store, f"{VALIDATION}/{version}")
        draws_first = gate == 1 and not passes and not is_there(store, f"metrics/{team.name}/0")
        found = [store.flow_state()["next"] is not None, draws_first, gate, passes, owes, version]
    return FlowBegun(*c.layout.world.broadcast_json(found))


def go_on_as_ready(c: Controller, begun: FlowBegun, checkpoints: CheckpointPart) -> FlowBegun:
    """Bring this team to where it was, as far as it needs no weights. Collective over it.

    Returns:
        `begun`, with the version that it needs first.
    """
    assert c.loader is not None, "checks refuse a training run without data"
    assert begun.version is not None, "it is not brought there yet"
    if not begun.is_open:
        return begun
    first, version = c.context.step, begun.version
    c.loader.load_state_dict(c.mail.read(PLACE))
    c.context.step = version
    if begun.gate > 1:
        _complete(c, first, version - 1 if begun.owes else version, checkpoints)
    if begun.passes:
        with phase("await_weights", waits_for=c.team.of(Role.ACTOR)):
            c.context.step = version = int(c.mail.read(f"{GATE}/{begun.gate}"))
        return replace(begun, owes=True, version=version)
    needed = begun.owes or version < c.config.trainer.steps
    return replace(begun, version=version if needed else None)


def _complete(c: Controller, first: int, last: int, checkpoints: CheckpointPart) -> None:
    """Its part of the newest checkpoint until step `last` may not be written, or not even begun: the actor's team waits
    for that, and pushes nothing before. Those before it were complete when it was begun.
    """
    if c.context.step == last and may_save(c.config, last):
        tell_place(c)
    for version in reversed(range(max(first + 1, last - KEPT // 2), last + 1)):
        if may_save(c.config, version) and checkpoints.complete(version, partial(_files, c, version)):
            return


def _files(c: Controller, version: int) -> dict[str, bytes]:
    """What this rank adds to its team's part of a checkpoint; what was left of it where others have gone on since."""
    store = store_of(c)
    if is_there(store, f"checkpoint/{c.team.plan.name}/{version}"):
        return store.left(version)
    return files_of_flow(c, version, {}, {}, Metrics())
