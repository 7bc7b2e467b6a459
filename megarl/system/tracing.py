"""Tracing: the current phase of this process, phase timings and trace events, and the phase in which an error occurred.

`with phase("rollout"):` nests. Error messages and hang reports show the innermost name; every closed phase becomes one
trace event and adds its seconds to `timing_s/<path>`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from megarl.system.errors import WorkerError


class Ranges(Protocol):
    """Where a profiler shows phases: a stack of named ranges of this thread."""

    def push(self, name: str) -> None:
        """Open a range."""
        ...

    def pop(self) -> None:
        """Close the range that was opened last."""
        ...


@dataclass(frozen=True)
class PhaseEvent:
    """One phase that has ended. `path` joins the names from the outermost phase by slashes; times: `time.time_ns()`.

    `waits_for` is the team for which this process waited; empty when it worked.
    """

    path: str
    start_ns: int
    end_ns: int
    step: int
    waits_for: str = ""

    @property
    def seconds(self) -> float:
        """Duration of the phase in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


_stack: list[str] = []
_events: list[PhaseEvent] = []
_on_change: list[Callable[[str], None]] = []
_failed_at: tuple[BaseException, str] | None = None
_ranges: Ranges | None = None
step_now = 0


def set_step(step: int) -> None:
    """Set the training step that is recorded in the following events."""
    global step_now
    step_now = step


def current() -> str:
    """Return the slash-joined path of the open phases, or `idle` outside all phases."""
    return "/".join(_stack) or "idle"


@contextlib.contextmanager
def located(errors: type[Exception], described: Callable[[str], str]) -> Iterator[None]:
    """In this block, raise a WorkerError that names this rank and its phase in place of `errors` of torch.

    Args:
        described: called with the current phase; returns the message, to which the error's own text is added.
    """
    try:
        yield
    except errors as error:
        raise WorkerError(f"{described(current())}: {error}") from error


def on_change(callback: Callable[[str], None]) -> None:
    """Call `callback(path)` whenever a phase opens or closes, and at every `beat`; heartbeats use it."""
    _on_change.append(callback)


def off_change(callback: Callable[[str], None]) -> None:
    """Call `callback` no more; a second call does nothing."""
    with contextlib.suppress(ValueError):
        _on_change.remove(callback)


def show_phases(ranges: Ranges | None) -> None:
    """Open a range of a profiler for every phase that opens from now on; None: open none."""
    global _ranges
    _ranges = ranges


def beat() -> None:
    """Report to the launcher that long work inside a phase makes progress. Takes microseconds, from any thread."""
    for callback in list(_on_change):  # another thread may remove one
        callback(current())


@contextlib.contextmanager
def keep_beating(limit_s: float = 6 * 3600.0, every_s: float = 5.0) -> Iterator[None]:
    """Call `beat` in the background while the block runs, for calls that cannot do it themselves, such as downloads. It
    stops after `limit_s` seconds, so that a hang is still noticed.
    """
    done, end = threading.Event(), time.monotonic() + limit_s

    def run() -> None:
        while not done.wait(every_s) and time.monotonic() < end:
            beat()

    threading.Thread(target=run, name="keep-beating", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def phase(name: str, waits_for: str = "") -> Iterator[None]:
    """Name the work inside the block as a phase. For an exception that leaves the block, `failed_at()` returns the
    innermost path. `waits_for` is the team for which this process only waits in the block; such blocks are not nested.
    """
    global _failed_at
    _stack.append(name)
    beat()
    ranges, start = _ranges, time.time_ns()
    if ranges is not None:
        ranges.push(name)
    try:
        yield
    except BaseException as error:
        if _failed_at is None or _failed_at[0] is not error:
            _failed_at = (error, current())
        raise
    finally:
        if ranges is not None:
            ranges.pop()
        _events.append(PhaseEvent(current(), start, time.time_ns(), step_now, waits_for))
        _stack.pop()
        beat()


def failed_at(error: BaseException) -> str:
    """Return the path of the phase in which `error` was raised; outside of phases the current path."""
    return _failed_at[1] if _failed_at is not None and _failed_at[0] is error else current()


def drain() -> list[PhaseEvent]:
    """Return the phases that were closed since the last call, oldest first."""
    events, _events[:] = list(_events), []
    return events
