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

from megarl.system import tracing
from megarl.system.comm import WorkerGroup
from megarl.system.errors import WorkerError
from megarl.system.progress_watch import ProgressWatch

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
        self._party, self._parties, self._is_first = party, parties, world.rank == 0
        self._prefix, self._next = f"meetings/{next(_numbers)}", 0
        self._store = world.store() if world.size > 1 else None
        self._called = self._arrived = self._watches = False
        self._looked = 0.0
        self._beats = 0
        self._closed = threading.Event()
        if self._store is not None:
            every_s = min(_REPORT_S, world.deadline_s / 8)
            self._watch = ProgressWatch(self._store, self._prefix, world, party, parties, every_s)
            if party is not None:
                tracing.on_change(self._beat)
                threading.Thread(target=self._report, name="meetings", daemon=True).start()

    def close(self) -> None:
        """Report no more progress: this rank joins no further meeting. Not collective."""
        self._closed.set()
        tracing.off_change(self._beat)

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
            WorkerError: a party that is not idle has made no progress for the world's deadline, or the store is gone.
        """
        if self._store is None or self._called:
            self._called = True
            return True
        if not self._arrived:
            self._arrived = True
            self._watch.start()
            self._store.set(self._key(f"idle/{self._party}"), "")
            arrived = self._store.add(self._key("idle"), 1)
            self._watches = arrived == 1
            if arrived == self._parties:
                self.call()
                return True
        self._called = self._store.has(self._key("called"), _LOOK_S)
        if self._watches and not self._called:
            store = self._store
            self._watch.refuse_stuck(lambda party: store.check([self._key(f"idle/{party}")]))
        return self._called

    def begin(self) -> None:
        """Begin the meeting of all ranks that was called: from now on, `call` calls the meeting after it. Every rank
        makes this call."""
        if self._store is not None and self._is_first:
            names = ("called", "idle", *(f"idle/{party}" for party in range(self._parties)))
            # keys of the previous meeting, which every rank has joined
            self._store.delete(*(f"{self._prefix}/{self._next - 1}/{name}" for name in names))
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
        before = -1
        while not self._closed.is_set():
            beats = self._beats
            try:
                if beats != before:
                    self._watch.report()
            except WorkerError:  # the store is gone: the main thread's next call raises an error
                return
            before = beats
            self._closed.wait(self._watch.every_s)
