"""Where a run begins: the team of the actor finds it, the others are told, and the run folder is theirs when all can.

    team of the actor                                      every other team
    checkpoint? cold start? what RL starts from
    start   {resumed_at, source, reference, critic} ---->  makes its models, reads its part of the checkpoint
                                                    <----  ready/TEAM
    the run folder becomes that of this start

With one team there is nobody to tell. A team that begins again because a process of it died (`OwnTeam.restarts`) reads
the same announcement, goes on after the last step that was over, and nobody waits for it here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.runtime.reference import drop_refused_start, keep_reference, keep_start, unchanged_model
from megarl.tracing import phase

if TYPE_CHECKING:
    from megarl.runtime.controller import Controller

_START, _READY = "start", "ready"


@dataclass(frozen=True)
class RunStart:
    """Where a run begins.

    Attributes:
        resumed_at: step of the checkpoint that it resumes from; None: from none.
        source: that checkpoint, RUN_DIR/checkpoints/step_N.
        reference: where the weights of the reference are; None: there is no reference.
        reference_key: of the recipe, that names them; empty: the run keeps them.
        critic: where those of a critic are that begins in another team; None: at `critic.path`, or in a checkpoint.
    """

    resumed_at: int | None
    source: str | None
    reference: str | None
    critic: str | None
    reference_key: str = ""

    @property
    def begun(self) -> bool:
        """It resumes from a step of RL: the actor of step 0 is where RL starts."""
        return bool(self.resumed_at)


def announce_start(c: Controller, resumed_at: int | None, source: Path | None) -> RunStart:
    """Keep what RL starts from for whoever begins with it, and tell the other teams. Collective over the actor's team.

    Args:
        c: this rank's controller, whose actor is where RL starts, unless the run resumes later.
        resumed_at: step of the checkpoint that it resumes from.
        source: that checkpoint.

    Raises:
        ConfigError: as `keep_reference`.
    """
    drop_refused_start(c)  # of a process that was killed
    c.layout.world.barrier()
    placement, begun = c.team.placement, bool(resumed_at)
    reference, key, critic = None, "", None
    if placement.of_role(Role.REFERENCE) is not None:
        reference, key = keep_reference(c, resumed_from=source, begun=begun)
    home = placement.of_role(Role.CRITIC)
    if home is not None and home != c.team.plan and c.config.critic.path is None and not begun:
        critic = (unchanged_model(c.config) if source is None else None) or keep_start(c)
    start = RunStart(resumed_at, None if source is None else str(source), reference, critic, key)
    c.team.post(c.layout, _START, dataclasses.asdict(start))
    return start


def follow_start(c: Controller) -> RunStart:
    """What the actor's team has announced."""
    with phase("await_start", waits_for=c.team.of(Role.ACTOR)):
        start = RunStart(**c.team.read(_START))
    c.context.step = max(start.resumed_at or 0, c.team.finished)
    return start


def all_ready(c: Controller) -> None:
    """Every team has its models: the actor's waits for that, the others say it, with the checksums of those that do not
    learn. Collective over a team."""
    c.layout.world.barrier()
    if not c.team.leads:
        c.team.post(c.layout, f"{_READY}/{c.team.plan.name}", c.frozen)
        return
    for team in c.team.others:
        with phase("await_teams", waits_for=team.name):
            c.frozen |= c.team.read(f"{_READY}/{team.name}")
