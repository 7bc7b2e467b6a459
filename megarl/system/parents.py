"""Ends a child when one of its parents ends, even if that was before the child began; its environment names the
parents.

    parent   environment of the child: MEGARL_PARENTS=PID:BEGAN[,PID:BEGAN...]
    child    end_with_parents()     at once, and then every second: has one of them ended?

`os.getppid` would return the adopting process if the parent was killed while the child started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

PARENTS = "MEGARL_PARENTS"
Parent = tuple[int, int]  # process id, and start time


def began(pid: int) -> int | None:
    """Return when a process began, in kernel ticks (0 without /proc); None when it has ended or is a zombie. Raise
    OSError if the start time cannot be read now.
    """
    try:
        if sys.platform != "linux":
            with contextlib.suppress(PermissionError):
                os.kill(pid, 0)
            return 0
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else int(fields[18])


def as_parent(above: str | None = None) -> dict[str, str]:
    """Return environment variables for a child process that must end when this process or one of `above` ends."""
    return {PARENTS: ",".join(filter(None, [above, f"{os.getpid()}:{began(os.getpid())}"]))}


def parents() -> list[Parent]:
    """Return the processes whose end must end this one: those set by `as_parent`, else the parent process."""
    named = os.environ.get(PARENTS)
    if named is None:
        return [(os.getppid(), began(os.getppid()) or 0)]
    return [(int(pid), int(when)) for pid, _, when in (parent.partition(":") for parent in named.split(","))]


def any_parent_ended(watched: list[Parent]) -> bool:
    """Return whether some process in `watched` has certainly ended."""
    with contextlib.suppress(OSError):
        return any(began(pid) != when for pid, when in watched)
    return False


def end_with_parents(poll_s: float = 1.0) -> None:
    """Kill this process at most `poll_s` seconds after one of its `parents` has ended."""
    watched = parents()

    def watch() -> None:
        while not any_parent_ended(watched):
            time.sleep(poll_s)
        os.kill(os.getpid(), signal.SIGKILL)

    if any_parent_ended(watched):
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, name="watch-parents", daemon=True).start()
