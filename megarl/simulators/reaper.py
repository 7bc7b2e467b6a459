"""A guardian that ends a process with foreign code and all its descendants, in any group or session.

    trainer -> guardian (this file: runs nothing foreign) -> worker -> what its code starts

The guardian adopts orphaned descendants. When the worker ends, or SIGTERM arrives, or the trainer is gone, it kills all
descendants, and exits with the worker's status. Linux only: elsewhere a process has no guardian.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from types import FrameType

from .parents import PARENTS, any_parent_ended, as_parent, parents

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_S = 5.0  # for code that keeps starting processes while it is killed


class _Terminated(BaseException):
    """SIGTERM has arrived."""


def guarded(*close: int) -> None:
    """Return in a worker, a child of this process, which stays as its guardian. Call it before any thread starts.

    Args:
        close: descriptors for the worker only.
    """
    if sys.platform != "linux":
        return
    prctl, trainer = ctypes.CDLL(None).prctl, parents()
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _on_signal)
    os.environ |= as_parent(os.environ.get(PARENTS))  # of the worker
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # left to the worker, which shares the group
        signal.signal(number, signal.SIG_IGN)
    for descriptor in close:
        os.close(descriptor)
    # If the trainer ended before this request to the kernel, no signal comes.
    status = None if any_parent_ended(trainer) else _wait_for(worker)
    _end_all()
    _end_as(status)


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _wait_for(worker: int) -> int | None:
    """Return how the worker ended; None: it has to be ended now."""
    try:
        while True:
            pid, status = os.wait()
            if pid == worker:
                return status
    except _Terminated:
        return None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_all() -> None:
    """Kill children until there are none: those of an ended child are adopted."""
    until = time.monotonic() + _END_S
    while (children := _children()) and time.monotonic() < until:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _children() -> list[int]:
    own, found = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == own:
                    found.append(int(name))
    return found


def _end_as(status: int | None) -> None:
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP have no handlers
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
