"""Where every worker stands, by its own word: who waits longer than others are silent learns of whom it waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Ping(NamedTuple):
    """What a worker tells about itself every few seconds.

    Attributes:
        changes: counts what it has done; waiting in the store does not count.
        phase: what it is doing.
        step: of the training.
        waits_for: what it waits for in the store; empty: it does not.
    """

    changes: int
    phase: str
    step: int
    waits_for: str


class Standing(NamedTuple):
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


@dataclass
class _Seen:
    ping: Ping | None
    since: float


class Roll:
    """The last word of every worker.

    Args:
        workers: how many each team has.
        now: seconds on any steady clock, the same for all calls.
    """

    def __init__(self, workers: dict[str, int], now: float) -> None:
        self._seen = {(team, rank): _Seen(None, now) for team, count in workers.items() for rank in range(count)}

    def ping(self, team: str, rank: int, ping: Ping, now: float) -> None:
        """A worker's word."""
        seen = self._seen[team, rank]
        if seen.ping is None or ping.changes != seen.ping.changes:
            seen.since = now
        seen.ping = ping

    def others(self, team: str, now: float) -> list[Standing]:
        """Of every other team the worker that made progress last."""
        last: dict[str, Standing] = {}
        for (name, rank), seen in self._seen.items():
            silent = now - seen.since
            if name != team and (name not in last or silent < last[name].silent_s):
                last[name] = Standing(name, rank, seen.ping, silent)
        return list(last.values())
