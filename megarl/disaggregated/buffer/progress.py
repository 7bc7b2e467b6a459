"""The last report of every worker, so that a worker that waits too long can list where the others stand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Ping(NamedTuple):
    """A worker's report on itself, sent every few seconds.

    Attributes:
        changes: number of phases that it has opened or closed; waiting for the buffer does not count.
        phase: the phase that it is in.
        waits_for: the data that it waits for; empty: it does not wait.
    """

    changes: int
    phase: str
    step: int
    waits_for: str


class Progress(NamedTuple):
    """Where a worker stands.

    Attributes:
        ping: its last report; None: it has not reported yet.
        silent_s: seconds since its last progress, or since the buffer started.
    """

    team: str
    rank: int
    ping: Ping | None
    silent_s: float

    def __str__(self) -> str:
        who = f"team {self.team!r} rank {self.rank}"
        if self.ping is None:
            return f"{who}: has not connected to the buffer, {self.silent_s:.0f} s after it started"
        where = f"in phase {self.ping.phase} at step {self.ping.step}"
        waits = f", waiting for {self.ping.waits_for}" if self.ping.waits_for else ""
        return f"{who}: {where}{waits}, last progress {self.silent_s:.0f} s ago"


class ProgressTable:
    """The last report of every worker. A query costs time by the number of teams, not of workers.

    Args:
        teams: by name.
        now: seconds on any steady clock, the same for all calls.
    """

    def __init__(self, teams: Iterable[str], now: float) -> None:
        self._pings: dict[tuple[str, int], Ping] = {}
        self._last: dict[str, tuple[int, float]] = dict.fromkeys(
            teams, (0, now)
        )  # the rank that made progress last, and when

    def ping(self, team: str, rank: int, ping: Ping, now: float) -> None:
        """Record a worker's report."""
        before = self._pings.get((team, rank))
        self._pings[team, rank] = ping
        if before is None or ping.changes != before.changes:
            self._last[team] = (rank, now)

    def restart(self, team: str, now: float, limit_s: float) -> None:
        """Note that a team restarts: until its first report, for at most `limit_s`, it counts as making progress."""
        self._pings = {worker: ping for worker, ping in self._pings.items() if worker[0] != team}
        self._last[team] = (0, now + limit_s)

    def others(self, team: str, now: float) -> list[Progress]:
        """Return the worker of every other team that made progress last."""
        return [
            Progress(name, rank, self._pings.get((name, rank)), max(0.0, now - since))
            for name, (rank, since) in self._last.items()
            if name != team
        ]
