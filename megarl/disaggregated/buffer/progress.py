"""The last report of every worker; the error of a worker that waited too long lists the progress of the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Ping(NamedTuple):
    """A worker's report on itself, sent every few seconds.

    Attributes:
        changes: number of phases that the worker has opened or closed; waiting for the buffer does not count.
        waits_for: the data that the worker waits for; empty: it does not wait.
    """

    changes: int
    phase: str
    step: int
    waits_for: str


class Progress(NamedTuple):
    """The progress of one worker.

    Attributes:
        ping: its last report; None: it has not reported yet.
        silent_s: seconds since its last progress, or since the buffer started.
    """

    team: str
    rank: int
    ping: Ping | None
    silent_s: float

    def __str__(self) -> str:
        worker = f"team {self.team!r} rank {self.rank}"
        if self.ping is None:
            return f"{worker}: has not connected to the buffer, {self.silent_s:.0f} s after it started"
        waits = f", waiting for {self.ping.waits_for}" if self.ping.waits_for else ""
        state = f"in phase {self.ping.phase} at step {self.ping.step}{waits}"
        return f"{worker}: {state}, last progress {self.silent_s:.0f} s ago"


class ProgressTable:
    """The last report of every worker. The time of a query depends on the number of teams, not of workers.

    Args:
        teams: names of the teams.
        now: seconds on any steady clock, the same for all calls.
    """

    def __init__(self, teams: Iterable[str], now: float) -> None:
        self._pings: dict[tuple[str, int], Ping] = {}
        # for each team the rank that was the last to make progress, and the time of this progress
        self._last: dict[str, tuple[int, float]] = dict.fromkeys(teams, (0, now))

    def ping(self, team: str, rank: int, ping: Ping, now: float) -> None:
        """Record a worker's report."""
        before = self._pings.get((team, rank))
        self._pings[team, rank] = ping
        if before is None or ping.changes != before.changes:
            self._last[team] = (rank, now)

    def restart(self, team: str, now: float, limit_s: float) -> None:
        """Count a team that restarts as making progress until its first report, for at most `limit_s`."""
        self._pings = {worker: ping for worker, ping in self._pings.items() if worker[0] != team}
        self._last[team] = (0, now + limit_s)

    def others(self, team: str, now: float) -> list[Progress]:
        """Return, for every other team, the worker that made progress last."""
        return [
            Progress(name, rank, self._pings.get((name, rank)), max(0.0, now - since))
            for name, (rank, since) in self._last.items()
            if name != team
        ]
