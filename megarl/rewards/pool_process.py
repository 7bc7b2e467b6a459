"""One process of the reward pool, on the pool's side. Sending and receiving never block."""

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

from megarl.rewards.images import packed
from megarl.rewards.process_output import ProcessOutput
from megarl.rewards.scoring import Sample
from megarl.system.parents import as_parent
from megarl.system.plain import PlainInbox, pack

_EXIT_S = 10.0  # seconds from SIGTERM until the guardian has ended, which kills children for up to 5 s
_READ = 1 << 16  # bytes per read
#: Maximum bytes and maximum nesting of a message from the process, which the scored code may control.
_HEADER, _DEPTH = 8 << 20, 8


class PoolProcess:
    """One process and its current chunk.

    Args:
        program: module that the process runs.
        setup: first message to the process.
        name: name in messages.
        quiet: drop the process's standard output.

    Attributes:
        process: the subprocess.
        output: prints the process's output.
        ready: whether the process has loaded its function.
        chunk: positions in the batch that it scores; empty: it is idle.
        done: positions with an outcome.
        stops: whether it skips the rest of the chunk after a failure.
        broken: whether it ended before it had received the whole chunk.
        since: start time of the sample that it scores.
    """

    def __init__(self, program: str, setup: dict[str, Any], name: str, *, quiet: bool = False) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
                stderr=subprocess.PIPE if quiet else subprocess.STDOUT,
                # starts a process group of its own, which is killed as a whole with the function's children
                start_new_session=True,
                env={**os.environ, **as_parent(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        pipe = self.process.stderr if quiet else self.process.stdout
        assert pipe is not None
        self.output = ProcessOutput(pipe, name)
        self._socket, self._inbox, self._outbox = ours, PlainInbox(_HEADER, 0, _DEPTH), bytearray()
        self._socket.setblocking(False)
        self.ready = self.stops = self.broken = False
        self.chunk: list[int] = []
        self.done: set[int] = set()
        self.since = time.monotonic()
        self._send(setup)

    def fileno(self) -> int:
        """Return the file descriptor of the connection."""
        return self._socket.fileno()

    @property
    def left(self) -> list[int]:
        """Positions of the chunk that have no outcome yet."""
        return [i for i in self.chunk if i not in self.done]

    @property
    def unsent(self) -> bool:
        """Whether bytes wait to be sent; `flush` sends them."""
        return bool(self._outbox)

    def give(self, chunk: list[int], samples: list[Sample], stop_at_failure: bool) -> None:
        """Send these positions of the batch to be scored."""
        self.chunk, self.done, self.stops, self.since = chunk, set(), stop_at_failure, time.monotonic()
        self._send({**packed([samples[i] for i in chunk]), "stop_at_failure": stop_at_failure})

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox += pack(message, finite=False)  # rows of data may hold NaN
        self.flush()

    def flush(self) -> None:
        """Send as much as the process can receive now. If the process is gone, a later read reports that and
        its cause."""
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox[: 1 << 20])]
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
            self._outbox.clear()

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that are complete after one read; raise EOFError if the connection is broken."""
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
        """Kill the process and its children, whatever their state."""
        self._socket.close()
        self.process.terminate()  # ends the guardian, which also kills children in other process groups
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S)
        with contextlib.suppress(OSError):  # raised when the group is empty
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.output.close()
