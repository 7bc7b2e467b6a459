"""Progress of parties in the run's store: each reports its own, and one that waits for the others finds a stuck one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.system import tracing
from megarl.system.errors import WorkerError

if TYPE_CHECKING:
    from megarl.system.comm import WorkerGroup
    from megarl.system.store import SharedStore


class ProgressWatch:
    """One party's view. A party is one rank, or several that work together.

    Args:
        name: first part of the keys.
        party: number of the party whose progress this rank reports; None: of none.
        parties: number of all parties.
        every_s: seconds between two looks at the others.
    """

    def __init__(
        self, store: SharedStore, name: str, world: WorkerGroup, party: int | None, parties: int, every_s: float
    ) -> None:
        self._store, self._name, self._world = store, name, world
        self._party, self._parties, self.every_s = party, parties, every_s
        self._watched = 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # party -> its progress, and when that changed

    def report(self) -> None:
        """Record that this party has made progress, and where it is."""
        where = f"rank {self._world.ranks[self._world.rank]} in phase {tracing.current()}"
        self._store.set(f"{self._name}/where/{self._party}", where)
        self._store.add(f"{self._name}/progress/{self._party}", 1)

    def start(self) -> None:
        """Measure the time without progress from now on."""
        self._seen = {}

    def refuse_stuck(self, is_exempt: Callable[[int], bool] = lambda party: False) -> None:
        """Look at the others if the last look was `every_s` ago.

        Args:
            is_exempt: returns whether a party needs no progress.

        Raises:
            WorkerError: a party has made no progress for the world's deadline.
        """
        now, limit_s = time.monotonic(), self._world.deadline_s
        if now - self._watched < self.every_s:
            return
        if now - self._watched > max(2 * self.every_s, limit_s / 2, 1.0):
            self.start()  # this party did something else meanwhile, perhaps together with the others
        self._watched = now
        for party in range(self._parties):
            count = self._store.add(f"{self._name}/progress/{party}", 0)
            if party not in self._seen or count != self._seen[party][0]:
                self._seen[party] = count, now
        late = [party for party, (_, since) in self._seen.items() if now - since > limit_s and party != self._party]
        if late := [party for party in late if not is_exempt(party)]:
            where = [f"{self._name}/where/{party}" for party in late[:16]]
            others = ", ".join(self._store.get(key).decode() for key in where if self._store.check([key]))
            raise WorkerError(
                f"rank {self._world.ranks[self._world.rank]} of {self._world.name} timed out waiting in phase "
                f"{tracing.current()}: no progress for {limit_s:g} s (cluster.timeout_s) of "
                f"{others or f'replicas {late[:16]}'}"
            )

    def delete(self) -> None:
        """Delete the keys of all parties, which report nothing any more."""
        for party in range(self._parties):
            self._store.delete(f"{self._name}/progress/{party}", f"{self._name}/where/{party}")
