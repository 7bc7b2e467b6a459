"""Automatic restarts of a team when one of its processes dies: which teams, how often, and the procedure.

    a process of the reference's team dies, or hangs    ->  the rest of the team is killed
    the buffer drops what is lost with it             ->  new processes on the same devices, which meet at a new port,
    (megarl.disaggregated.buffer.core.Core.restart_team)                   begin after the last step that is over

A team does not restart after an exception of the program, which would recur, unless it ran out of memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megarl.dag.placement import begins_again
from megarl.runtime.health import RankFailure, set_aside
from megarl.system.errors import count
from megarl.tracking.close import note_restart

if TYPE_CHECKING:
    from megarl.dag.placement import TeamPlan
    from megarl.launchers.common import Job, Workers
    from megarl.runtime.health import Watch


@runtime_checkable
class TeamWorkers(Protocol):
    """The workers of a run with several teams, of which single teams can be restarted."""

    def end_team(self, team: TeamPlan) -> None:
        """Kill the running workers of a team, and wait until they are gone. Raise WorkerError if they are not gone
        within `cluster.start_timeout_s`.
        """

    def restart_team(self, team: TeamPlan, number: int) -> int | None:
        """Start all workers of a team that has ended, for the `number`-th time; return the last finished step, None
        before the first. Raise WorkerError if they do not start within `cluster.start_timeout_s`.
        """


class Restarts:
    """Restarts single teams of a run after one of their workers died or hung."""

    def __init__(self, workers: Workers, job: Job, watch: Watch) -> None:
        self._job, self._watch = job, watch
        self._workers = workers if isinstance(workers, TeamWorkers) else None
        self._begun = {team.name: 0 for team in job.teams if job.separate and begins_again(job.config, team)}

    def after_death(self, failure: RankFailure, why: str, ended: dict[int, int]) -> bool:
        """Restart the team of `failure`; return False if the team must not be restarted, so that the run ends. Raise
        WorkerError if the team did not start.
        """
        if failure.repeats or failure.user_error or (failure.type and not failure.out_of_memory):
            return False
        bad = {rank for rank, code in ended.items() if code} | self._job.errors().keys()
        return self._restart(failure.rank, bad, why)

    def after_hang(self, stuck: list[int], trouble: str) -> bool:
        """Restart the team of the workers `stuck`, which make no progress; return False if it must not be restarted."""
        return bool(stuck) and self._restart(stuck[0], stuck, trouble)

    def spent(self, *ranks: int) -> list[str]:
        """Return a line for each worker in `ranks` whose team has used up its restarts."""
        limit = self._job.config.placement.restarts
        again = f"has started again {count(limit, 'time')} before (placement.restarts={limit})"
        teams = [self._team(rank).name for rank in ranks]
        return [f"  its team {name!r} {again}" for name in teams if self._begun.get(name) == limit]

    def _team(self, rank: int) -> TeamPlan:
        return next(team for team in self._job.teams if team.first <= rank < team.first + team.devices)

    def _restart(self, rank: int, bad: Iterable[int], why: str) -> bool:
        """Restart the team of `rank`, unless one of the `bad` workers is in a team that must not be restarted."""
        job, team, limit = self._job, self._team(rank), self._job.config.placement.restarts
        if self._workers is None or any(self._team(other).name not in self._begun for other in bad):
            return False
        if self._begun[team.name] >= limit:
            return False
        self._begun[team.name] = number = self._begun[team.name] + 1
        ranks, began = range(team.first, team.first + team.devices), time.monotonic()
        job.log.say(f"megarl: {why}: team {team.name!r} starts again ({number} of {limit})")
        self._workers.end_team(team)
        for path in set_aside(job.run_dir, ranks, number):
            job.log.record("launcher", f"its error is in {path}")
        self._watch.begin_again(ranks)
        finished = self._workers.restart_team(team, number)
        start = f"team {team.name!r} goes on " + (
            "with the first step" if finished is None else f"after step {finished}"
        )
        job.log.say(f"megarl: {start}, {time.monotonic() - began:.1f} s later")
        note_restart(job.run_dir, why, start)
        return True
