"""Where a run begins: the team of the actor finds it, the others are told, and the run folder is theirs when all can.

    team of the actor                                      every other team
    checkpoint? cold start? what RL starts from
    start   {resumed_at, source, reference, critic} ---->  makes its models, reads its part of the checkpoint
                                                    <----  ready/TEAM
    the run folder becomes that of this start

A team that begins again because a process of it died (`OwnTeam.restarts`) reads
the same announcement, goes on after the last step that was over, and nobody waits for it here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.runtime.frozen_models import RunStart
from megarl.tracing import phase

if TYPE_CHECKING:
    from megarl.runtime.rank_state import RankState

_START, _READY = "start", "ready"


def announce_start(c: RankState, start: RunStart) -> None:
    """Tell the other teams where the run begins. Collective over the actor's team."""
    c.team.post(c.layout, _START, dataclasses.asdict(start))


def follow_start(c: RankState) -> RunStart:
    """Return the start that the actor's team has announced."""
    with phase("await_start", waits_for=c.team.of(Role.ACTOR)):
        start = RunStart(**c.team.read(_START))
    c.context.step = max(start.resumed_at or 0, c.team.finished)
    return start


def all_ready(c: RankState) -> None:
    """Every team has its models: the actor's waits for that, the others say it, with the checksums of those that do not
    learn. Collective over a team."""
    c.layout.world.barrier()
    if not c.team.leads:
        c.team.post(c.layout, f"{_READY}/{c.team.plan.name}", c.frozen)
        return
    for team in c.team.others:
        with phase("await_teams", waits_for=team.name):
            c.frozen |= c.team.read(f"{_READY}/{team.name}")
