"""Meetings: points at which all ranks join a collective, although each works at its own pace until then. Any rank can
call the next meeting, by a key in the run's store.

    every rank      works; checks a few times a second whether the key of the next meeting exists; then joins
    any rank        `call`: sets the key
    idle parties    `await_call`: they arrive; the last one of all calls the meeting

A party is one rank, or several that work together (a replica), of which one arrives. A check is one small message to
the store, which a thread of rank 0's process answers without Python. So no rank waits for slower ones, as it would in a
collective several times a second. The deadline of the world still holds: the first idle party watches the progress of
the others, and raises an error that names parties without progress.
"""

from __future__ import annotations

import itertools
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from megarl.system import tracing
from megarl.system.comm import WorkerGroup
from megarl.system.errors import WorkerError

_LOOK_S = 0.2  # seconds between two checks whether the next meeting was called
_REPORT_S = 5.0  # longest time in seconds between two reports of progress
_numbers = itertools.count()  # for keys in the store; all ranks create their `Meetings` in the same order


class Meetings:
    """Lets ranks that work at their own pace call meetings: points at which all ranks of `world` join a collective.
    Every rank has one such object, and all ranks join the same meetings.

    Args:
        party: number of this rank's party (a rank, or the ranks of a replica); None for ranks of a party that are not
            the one which arrives and reports progress for it.
        parties: number of all parties.
    """

    def __init__(self, world: WorkerGroup, party: int | None = 0, parties: int = 1) -> None:
        self._world, self._party, self._parties = world, party, parties
        self._prefix, self._next = f"meetings/{next(_numbers)}", 0
        self._store = world.store() if world.size > 1 else None
        self._called = self._arrived = self._watches = False
        self._looked = self._watched = 0.0
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}  # party -> number of its last report, and when it came
        self._every_s = min(_REPORT_S, world.deadline_s / 8)
        if self._store is not None and party is not None:
            tracing.on_change(self._beat)
            threading.Thread(target=self._report, name="meetings", daemon=True).start()

    def call(self) -> None:
        """Call the next meeting, which all ranks will join; does nothing if a rank has called it already."""
        if not self._called and self._store is not None:
            self._store.set(self._key("called"), "")
        self._called = True

    def is_called(self) -> bool:
        """Return whether the next meeting, which all ranks must join, has been called; never waits.

        The rank that arrives for a party checks the store a few times a second. Other ranks of the party return whether
        they have called the meeting themselves.
        """
        now = time.monotonic()
        looks = self._store is not None and self._party is not None
        if not self._called and looks and now - self._looked > _LOOK_S:
            self._looked = now
            assert self._store is not None
            self._called = self._store.check([self._key("called")])
        return self._called

    def await_call(self) -> bool:
        """Record that this party is idle, wait for a fraction of a second, and return whether the next meeting of all
        ranks has been called. The caller repeats this until the result is True, and then joins the meeting.

        Raises:
            WorkerError: a party that is not idle has made no progress for the world's deadline.
        """
        if self._store is None or self._called:
            self._called = True
            return True
        if not self._arrived:
            self._arrived, self._seen = True, {}
            self._store.set(self._key(f"idle/{self._party}"), "")
            arrived = self._store.add(self._key("idle"), 1)
            self._watches = arrived == 1
            if arrived == self._parties:
                self.call()
                return True
        try:
            self._store.wait([self._key("called")], timedelta(seconds=_LOOK_S))
            self._called = True
        except dist.DistStoreError:  # not called within _LOOK_S
            if self._watches:
                self._refuse_stuck(self._store)
        return self._called

    def begin(self) -> None:
        """Begin the meeting of all ranks that was called: from now on, `call` calls the meeting after it. Every rank
        makes this call."""
        if self._store is not None and self._world.rank == 0:
            for name in ("called", "idle", *(f"idle/{party}" for party in range(self._parties))):
                # keys of the previous meeting, which every rank has joined
                self._store.delete_key(f"{self._prefix}/{self._next - 1}/{name}")
        self._next += 1
        self._called = self._arrived = False

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._next}/{name}"

    # -- progress ----------------------------------------------------------------------------------------------------

    def _beat(self, path: str) -> None:
        self._beats += 1

    def _report(self) -> None:
        """Report to the store every few seconds, in a thread: this party's phase, and a counter that grows only if the
        party made progress."""
        assert self._store is not None
        before = -1
        while True:
            beats = self._beats
            try:
                if beats != before:
                    where = f"rank {self._world.ranks[self._world.rank]} in phase {tracing.current()}"
                    self._store.set(f"{self._prefix}/where/{self._party}", where)
                    self._store.add(f"{self._prefix}/progress/{self._party}", 1)
            except RuntimeError:  # the store is gone: the main thread's next call raises an error
                return
            before = beats
            time.sleep(self._every_s)

    def _refuse_stuck(self, store: dist.Store) -> None:
        """Raise WorkerError if a party (a rank or a replica) that is not idle has made no progress for longer than the
        deadline."""
        now, limit_s = time.monotonic(), self._world.deadline_s
        if now - self._watched < self._every_s:
            return
        self._watched = now
        for party in range(self._parties):
            count = store.add(f"{self._prefix}/progress/{party}", 0)
            if party not in self._seen or count != self._seen[party][0]:
                self._seen[party] = count, now
        late = [party for party, (_, since) in self._seen.items() if now - since > limit_s]
        if late := [party for party in late if not store.check([self._key(f"idle/{party}")])]:
            where = [f"{self._prefix}/where/{party}" for party in late[:16]]
            others = ", ".join(store.get(key).decode() for key in where if store.check([key]))
            raise WorkerError(
                f"rank {self._world.ranks[self._world.rank]} of {self._world.name} timed out waiting in phase "
                f"{tracing.current()}: no progress for {limit_s:g} s (cluster.timeout_s) of {others}"
            )
