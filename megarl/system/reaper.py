"""A guardian process that ends a process with foreign code and all its descendants, in any group or session.

    trainer -> guardian (this file: runs nothing foreign) -> worker -> what its code starts

The guardian adopts orphaned descendants. When the worker ends, SIGTERM arrives, or the trainer is gone, it kills all
descendants and exits with the worker's status. Linux only: elsewhere a process has no guardian.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator

from megarl.system.parents import PARENTS, any_parent_ended, as_parent, parents

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_S = 5.0  # seconds after which `_end_all` gives up, for example if code keeps starting processes
_AWAITED = (signal.SIGTERM, signal.SIGCHLD)


def guarded(*close: int) -> None:
    """Fork this process. The function returns in the child, the worker; this process remains as the worker's guardian.

    Call this before any thread starts. No signal handler interrupts the guardian: SIGTERM and SIGCHLD are blocked
    except while it waits for them, so none is lost. The guardian closes the descriptors `close`, which only the worker
    needs.
    """
    if sys.platform != "linux":
        return
    prctl, trainer = ctypes.CDLL(None).prctl, parents()
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # when SIGCHLD is ignored, children that end leave no status
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # the worker inherits this variable; processes that read it end when this process, the worker's guardian, ends
    os.environ |= as_parent(os.environ.get(PARENTS))
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    status = None
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        # The worker, which is in the same process group, handles these signals.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        for descriptor in close:
            os.close(descriptor)
        # The kernel sends no signal if the trainer ended before PR_SET_PDEATHSIG was set, so check that here.
        status = None if any_parent_ended(trainer) else _wait_for(worker)
    finally:
        _end_all()
        _end_as(status)


def _wait_for(worker: int) -> int | None:
    """Return how the worker ended; None when SIGTERM arrived first."""
    while signal.sigwait(_AWAITED) != signal.SIGTERM:
        for pid, status in _ended():
            if pid == worker:
                return status
    return None


def _ended() -> Iterator[tuple[int, int]]:
    """Yield process id and exit status of each child that has ended."""
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _end_all() -> None:
    """Kill this process's children until none is left: when a child ends, its own children become this process's."""
    until = time.monotonic() + _END_S
    while (children := _children()) and time.monotonic() < until:
        for pid in children:
            with contextlib.suppress(OSError):  # the process has ended, or runs as another user
                os.kill(pid, signal.SIGKILL)
        for _ in _ended():
            pass
        time.sleep(0.002)


def _children() -> list[int]:
    guardian, children = os.getpid(), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == guardian:
                children.append(int(name))
    return children


def _end_as(status: int | None) -> None:
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # drops a pending SIGTERM, which would hide the signal that ended the worker
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP cannot have handlers
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.kill(os.getpid(), -code)
    os._exit(code)
