"""Where every worker stands, by its own word: who waits longer than others are silent learns of whom it waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Ping(NamedTuple):
    """A worker's report on itself, sent every few seconds.

    Attributes:
        changes: counts what it has done; waiting in the store does not count.
        phase: what it is doing.
        waits_for: what it waits for in the store; empty: it does not.
    """

    changes: int
    phase: str
    step: int
    waits_for: str


class Progress(NamedTuple):
    """Where a worker stands.

    Attributes:
        ping: its last word; None: it has not come yet.
        silent_s: seconds since it last made progress, or since the store began.
    """

    team: str
    rank: int
    ping: Ping | None
    silent_s: float

    def __str__(self) -> str:
        who = f"team {self.team!r} rank {self.rank}"
        if self.ping is None:
            return f"{who}: has not come to the store, {self.silent_s:.0f} s after it began"
        where = f"in phase {self.ping.phase} at step {self.ping.step}"
        waits = f", waiting for {self.ping.waits_for}" if self.ping.waits_for else ""
        return f"{who}: {where}{waits}, last progress {self.silent_s:.0f} s ago"


class ProgressTable:
    """The last word of every worker. What it is asked costs as much as there are teams, however many workers they have.

    Args:
        teams: by name.
        now: seconds on any steady clock, the same for all calls.
    """

    def __init__(self, teams: Iterable[str], now: float) -> None:
        self._pings: dict[tuple[str, int], Ping] = {}
        self._last: dict[str, tuple[int, float]] = dict.fromkeys(teams, (0, now))  # who moved last, and when

    def ping(self, team: str, rank: int, ping: Ping, now: float) -> None:
        """Take in a worker's report."""
        before = self._pings.get((team, rank))
        self._pings[team, rank] = ping
        if before is None or ping.changes != before.changes:
            self._last[team] = (rank, now)

    def restart(self, team: str, now: float, limit_s: float) -> None:
        """This team starts again; until its first word, and for `limit_s` at most, it makes progress."""
        self._pings = {worker: ping for worker, ping in self._pings.items() if worker[0] != team}
        self._last[team] = (0, now + limit_s)

    def others(self, team: str, now: float) -> list[Progress]:
        """Of every other team the worker that made progress last."""
        return [
            Progress(name, rank, self._pings.get((name, rank)), max(0.0, now - since))
            for name, (rank, since) in self._last.items()
            if name != team
        ]
