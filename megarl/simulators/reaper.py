"""Ends a process that runs foreign code with all that it started, whatever groups and sessions that went to.

    trainer -> guardian (this file: runs nothing foreign) -> worker -> what its code starts

The guardian adopts what loses its parent below it. When the worker ends, or SIGTERM comes, or the trainer is gone, it
ends everything below it, and ends as the worker did. Linux only: elsewhere a process has no guardian.
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

from .parents import PARENTS, as_parent, one_has_ended, parents

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_S = 5.0  # for what goes on to start processes while it is ended


class _Told(BaseException):
    """SIGTERM has come."""


def guarded(*close: int) -> None:
    """Return in a worker, a child of this process, which stays as its guardian. Called before any thread starts.

    Args:
        close: descriptors that are the worker's only.
    """
    if sys.platform != "linux":
        return
    prctl, trainer = ctypes.CDLL(None).prctl, parents()
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _told)
    os.environ |= as_parent(os.environ.get(PARENTS))  # of the worker
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # for the worker, who shares the group
        signal.signal(number, signal.SIG_IGN)
    for descriptor in close:
        os.close(descriptor)
    # A trainer that was gone before the kernel was asked to tell is not told of.
    status = None if one_has_ended(trainer) else _wait_for(worker)
    _end_all()
    _end_as(status)


def _told(number: int, frame: FrameType | None) -> None:
    raise _Told


def _wait_for(worker: int) -> int | None:
    """How the worker ended; None: it is to end now."""
    try:
        while True:
            pid, status = os.wait()
            if pid == worker:
                return status
    except _Told:
        return None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_all() -> None:
    """Kill the children until there are none: those of a child that ends come here."""
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
