"""A guardian ends everything below it, whenever the signal to do so arrives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

LIMIT_S = 120
#: A worker that starts a process in a session of its own, writes its process id and goes on.
WORKER = """
import os, subprocess, sys, time
from megarl.system.reaper import guarded
{before}
guarded()
print(subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(600)
"""
#: The guardian gets SIGTERM between the fork and its next line, and once more while it ends its children.
SIGNALS_OUTSIDE_THE_WAIT = """
import select, signal
fork, listdir = os.fork, os.listdir
reader, writer = os.pipe()
def forked():
    worker = fork()
    if worker == 0:
        os.dup2(writer, 1)
        return worker
    os.write(1, os.read(reader, 100))
    os.kill(os.getpid(), signal.SIGTERM)
    return worker
def listed(*path):
    os.kill(os.getpid(), signal.SIGTERM)
    return listdir(*path)
os.fork, os.listdir = forked, listed
"""


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Process ids that a test expects to end, killed after it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def guardian(before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER.format(before=before)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def detached_of(process: subprocess.Popen[str]) -> int:
    """Return the process id of what the worker started; it may have ended by now."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def wait_for_end(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(LIMIT_S)


def test_signals_outside_the_wait_for_the_worker_end_everything(started: list[int]) -> None:
    with guardian(SIGNALS_OUTSIDE_THE_WAIT) as process:
        detached = detached_of(process)
        started.append(detached)
        assert process.wait(LIMIT_S) == -signal.SIGKILL
        wait_for_end(detached)


@pytest.mark.campaign("faults")
def test_no_detached_process_outlives_500_guardians(started: list[int]) -> None:
    for number in range(500):
        with guardian() as process:
            detached = detached_of(process)
            started.append(detached)
            worker = psutil.Process(process.pid).children()[0]
            time.sleep(number % 10 * 1e-4)
            worker.kill()  # its end and the signal arrive together
            process.terminate()
            process.wait(LIMIT_S)
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(detached).status() == psutil.STATUS_ZOMBIE, f"guardian {number}"
        started.remove(detached)
