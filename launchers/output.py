"""Output of all ranks: rank 0's goes to the console unchanged, every rank's as whole lines to RUN_DIR/log.txt."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, TextIO

from megarl.system.errors import printable

_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
#: A line with one of these texts belongs to a progress bar: the code that erases the old bar, and a piece of the bar.
_OF_BAR = (b"\x1b[2K", "━".encode())
_SHOW_CURSOR = b"\x1b[?25h"
_LONGEST_LINE = 1 << 16
_POLL_S = 0.1  # seconds between two reads of the ranks' files
_CHUNK = 512  # bytes per write, for which a terminal or pipe that is ready has space
#: Seconds within which a console must become ready.
CONSOLE_S = 5.0
_silent: set[int] = set()  # descriptors of consoles that were not ready within CONSOLE_S


class OutputLog:
    """A log of the workers' raw output, by worker number. Threads may share it.

    Args:
        name: returns a worker's name, which is written in front of its lines.
        split: only JSON objects of rank 0 go to standard output; its other lines go to standard error.
    """

    def __init__(self, path: Path, name: Callable[[int], str] = "rank {}".format, *, split: bool = False) -> None:
        self._name, self._split = name, split
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._pending: dict[int, bytes] = {}
        # rank 0's unfinished line at the last message; while it stays the same, the console is already on a new line
        self._ended = b""

    def write(self, rank: int, data: bytes) -> None:
        """Add output that `rank` printed."""
        if rank == 0 and not self._split:
            _to_console(data, sys.stdout)
        with self._lock:
            *lines, rest = (self._pending.get(rank, b"") + data).split(b"\n")
            self._pending[rank] = rest[-_LONGEST_LINE:]
            self._keep(b"".join(self._as_line(rank, line) for line in lines))
        for line in lines if rank == 0 and self._split else ():
            _to_console(line + b"\n", sys.stdout if line.startswith(b'{"step"') else sys.stderr)

    def say(self, text: str) -> None:
        """Print a message of the launcher itself to stderr and to the file."""
        text = printable(text)
        self._end_line()
        with contextlib.suppress(OSError, ValueError):
            if _takes(sys.stderr):
                print(text, file=sys.stderr, flush=True)
        self.record("launcher", text)

    def record(self, source: str, text: str) -> None:
        """Write `text` into the log file but not to the console, each line marked with its `source`."""
        with self._lock:
            self._keep("".join(f"[{source}] {line}\n" for line in text.splitlines()).encode("utf-8", "replace"))

    def close(self) -> None:
        """Write the remaining partial lines, except progress bars of killed workers, and close the file."""
        self._end_line()
        with self._lock:
            rests = {rank: rest for rank, rest in self._pending.items() if rest and not _is_bar(rest)}
            self._keep(b"".join(self._as_line(rank, rest) for rank, rest in rests.items()))
            self._pending.clear()
            self._file.close()

    def _end_line(self) -> None:
        """Begin a new line on the console if rank 0 left one unfinished, such as a killed worker's progress bar."""
        with self._lock:
            rest = self._pending.get(0, b"")
            unfinished = not self._split and rest != self._ended and _ESCAPES.sub(b"", rest).strip()
            self._ended = rest
        if unfinished:
            _to_console((_SHOW_CURSOR if _is_bar(rest) else b"") + b"\n", sys.stdout)

    def _keep(self, lines: bytes) -> None:
        """Add lines to the file; on a full disk only these lines are lost."""
        with contextlib.suppress(OSError):
            self._file.write(lines)

    def _as_line(self, rank: int, raw: bytes) -> bytes:
        """Return one line for the file. A progress bar redraws its line; only its last state is kept."""
        drawings = [part for part in _ESCAPES.sub(b"", raw).split(b"\r") if part.strip()]
        text = drawings[-1].rstrip().decode("utf-8", "surrogateescape") if drawings else ""
        return b"[%s] %s\n" % (self._name(rank).encode(), printable(text).encode("utf-8", "surrogateescape"))


def _is_bar(line: bytes) -> bool:
    return any(part in line for part in _OF_BAR)


def _to_console(data: bytes, stream: TextIO) -> None:
    """Write to a stream without blocking the run when its terminal is gone or stopped."""
    with contextlib.suppress(OSError, ValueError):
        if not _takes(stream):
            return
        stream.flush()
        handle = stream.fileno()
        for start in range(0, len(data), _CHUNK):
            if not _takes(stream):
                return
            os.write(handle, data[start : start + _CHUNK])


def _takes(stream: TextIO) -> bool:
    """Return whether a stream accepts output within `CONSOLE_S`; after a failed wait, do not wait again. The caller
    drops output that the stream does not accept; the log file has it.
    """
    try:
        handle = stream.fileno()
    except (OSError, ValueError):  # a stream without a descriptor is always ready
        return True
    is_ready = bool(select.select([], [handle], [], 0 if handle in _silent else CONSOLE_S)[1])
    (_silent.discard if is_ready else _silent.add)(handle)
    return is_ready


def pump(pipe: IO[bytes], rank: int, log: OutputLog) -> threading.Thread:
    """Start and return a thread that copies a rank's output from `pipe` to the log until the pipe closes."""

    def copy() -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                log.write(rank, data)

    thread = threading.Thread(target=copy, name=f"output-{rank}", daemon=True)
    thread.start()
    return thread


class Follower:
    """A thread that copies new output of the ranks from the files LOG_DIR/rank_K.txt to the log, for ranks that are not
    child processes of the launcher.

    Args:
        ranks: the ranks whose files this launcher copies.
        size_of: returns the size of a rank's file as the rank's machine reports it, so that only files that have grown
            are opened; None: open all files in every poll.
    """

    def __init__(
        self, log_dir: Path, ranks: Iterable[int], log: OutputLog, size_of: Callable[[int], int | None] | None = None
    ) -> None:
        self._log, self._size_of = log, size_of
        self._paths = {rank: log_dir / f"rank_{rank}.txt" for rank in ranks}
        self._offsets = {rank: path.stat().st_size if path.exists() else 0 for rank, path in self._paths.items()}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow-output", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._done.wait(_POLL_S):
            self._copy_new()
        self._size_of = None  # open all files: the reported sizes may not include the last lines
        self._copy_new()

    def _copy_new(self) -> None:
        for rank, path in self._paths.items():
            # the file of rank 0 is read in every poll, so that the console shows its lines at once
            if rank and self._size_of is not None and (self._size_of(rank) or 0) <= self._offsets[rank]:
                continue
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(self._offsets[rank])
                if data := file.read():
                    self._offsets[rank] += len(data)
                    self._log.write(rank, data)

    def close(self) -> None:
        """Copy the workers' remaining output and end the thread."""
        self._done.set()
        self._thread.join()
