"""Prints the output of processes with foreign code, up to a limit."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import IO

from megarl.system.errors import printable

LIMIT = 1 << 16  # bytes of output that are printed for a process; `renew` starts a new count
_CHUNK = 1 << 16
_END_S = 1.0  # seconds to wait for the last lines; a process that left its group may hold the pipe open for longer


class ProcessOutput:
    """A thread that prints what arrives at a pipe, with control characters as escapes.

    Output beyond LIMIT is dropped, so that a function that prints fills no disk; it is still read, so that the function
    never blocks.

    Args:
        pipe: the reading end.
        name: name of the process in messages.
    """

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self._pipe, self._name, self._left = pipe, name, LIMIT
        self._thread = threading.Thread(target=self._copy, name="process-output", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Allow another LIMIT bytes of output."""
        self._left = LIMIT

    def close(self) -> None:
        """Print the remaining output after the process has ended."""
        self._thread.join(_END_S)

    def _copy(self) -> None:
        with self._pipe:
            while data := os.read(self._pipe.fileno(), _CHUNK):
                left, self._left = self._left, self._left - len(data)
                if left > 0:
                    _print(data[:left].decode("utf-8", "backslashreplace"))
                if left >= 0 > self._left:
                    _print(f"{self._name}: output beyond {LIMIT:,} bytes is dropped")


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard output is no longer read
        print(printable(text), end="", flush=True)
