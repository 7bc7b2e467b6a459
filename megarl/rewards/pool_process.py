"""One process of the reward pool, as the pool sees it: neither sending nor receiving ever waits for it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from megarl.rewards.scoring import Sample
from megarl.simulators.parents import as_parent
from megarl.simulators.plain import PlainInbox, pack

_EXIT_S = 5.0  # from a broken connection to the end of the process
_READ = 1 << 16  # bytes at a time
#: Of a message of the process, which may be under the control of what it scores.
_HEADER, _DEPTH = 8 << 20, 8


class PoolProcess:
    """One process and the chunk it is busy with.

    Args:
        program: module that it runs.
        setup: what it is told first.

    Attributes:
        process: itself.
        ready: it has loaded its function.
        chunk: positions in the batch that it scores; none: it is idle.
        done: those that it has said the outcome of.
        stops: it goes on with no other of them after a failure.
        broken: it was gone before it took the chunk whole.
        since: when the sample in work was begun.
    """

    def __init__(self, program: str, setup: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # one group of its own, ended as a whole with what a function started
                env={**os.environ, **as_parent(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        self._socket, self._inbox, self._outbox = ours, PlainInbox(_HEADER, 0, _DEPTH), bytearray()
        self._socket.setblocking(False)
        self.ready = self.stops = self.broken = False
        self.chunk: list[int] = []
        self.done: set[int] = set()
        self.since = time.monotonic()
        self._send(setup)

    def fileno(self) -> int:
        """Of the connection."""
        return self._socket.fileno()

    @property
    def left(self) -> list[int]:
        """Positions of the chunk that are not scored yet."""
        return [i for i in self.chunk if i not in self.done]

    @property
    def unsent(self) -> bool:
        """There are bytes that the process has not taken yet: `flush` goes on with them."""
        return bool(self._outbox)

    def give(self, chunk: list[int], samples: list[Sample], stop_at_failure: bool) -> None:
        """Let it score these positions of the batch."""
        self.chunk, self.done, self.stops, self.since = chunk, set(), stop_at_failure, time.monotonic()
        self._send({"samples": [samples[i] for i in chunk], "stop_at_failure": stop_at_failure})

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox += pack(message, finite=False)  # rows of data may hold NaN
        self.flush()

    def flush(self) -> None:
        """Send what the process takes now. That it is gone shows when it is read from, which says how."""
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox[: 1 << 20])]
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
            self._outbox.clear()

    def receive(self) -> Iterator[dict[str, Any]]:
        """Messages that have come whole, as far as one read goes.

        Raises:
            EOFError: the connection is broken.
            Malformed: what came is no message.
        """
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise EOFError
        self._inbox.feed(data)
        while (message := self._inbox.take()) is not None:
            yield message[0]

    def kill(self) -> None:
        """End the process and what it started, whatever they do."""
        self._socket.close()
        self.process.terminate()  # its guardian, which finds what has left the group (megarl.simulators.reaper)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S)
        with contextlib.suppress(OSError):  # nothing of its group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
