"""Prints what processes with foreign code print, up to a bound."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import IO

from megarl.system.errors import printable

LIMIT = 1 << 16  # bytes of a process until `renew`
_CHUNK = 1 << 16
_END_S = 1.0  # for the last lines; a process that left its group may hold the pipe for longer


class ProcessOutput:
    """A thread that prints what arrives at a pipe, with control characters as escapes. More than LIMIT is dropped, so
    that a function that prints fills no disk, and is read all the same, so that it never blocks.

    Args:
        pipe: the reading end.
        name: of the process in messages.
    """

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self._pipe, self._name, self._left = pipe, name, LIMIT
        self._thread = threading.Thread(target=self._copy, name="process-output", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Allow LIMIT bytes again."""
        self._left = LIMIT

    def close(self) -> None:
        """Print the rest after the process has ended."""
        self._thread.join(_END_S)

    def _copy(self) -> None:
        with self._pipe:
            while data := os.read(self._pipe.fileno(), _CHUNK):
                left, self._left = self._left, self._left - len(data)
                if left > 0:
                    _print(data[:left].decode("utf-8", "backslashreplace"))
                if left >= 0 > self._left:
                    _print(f"\n{self._name}: what it prints beyond {LIMIT:,} bytes is dropped\n")


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more
        print(printable(text), end="", flush=True)
