"""The processes of pytest-xdist: forked with their imports done, and brief.

They are forked from a process of tests/fork_servers.py. Each of them would import for four CPU-seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator
from multiprocessing import forkserver, get_context, process
from multiprocessing.connection import Connection

import pytest
from _pytest.runner import runtestprotocol
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from megarl.system.processes import has_nvidia_device
from tests import fork_servers

_PRELOAD = "tests.preload"


def fork_workers(run: str) -> None:
    """Fork the processes that this one will start for the run of this id, whose tests use the same server."""
    if has_nvidia_device():
        return
    with pytest.MonkeyPatch.context() as patch, _silence():  # ranks of tests are forked from the same server
        patch.setenv("PYTEST_XDIST_TESTRUNUID", run)
        server = fork_servers.first_server(_PRELOAD)
    gateway_io.Popen2IOMaster = functools.partial(_ForkedIO, server)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Processes that are started within the block write to nowhere."""
    kept = [os.dup(number) for number in (1, 2)]
    with open(os.devnull, "w") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
    try:
        yield
    finally:
        for number, file in zip((1, 2), kept, strict=True):
            os.dup2(file, number)
            os.close(file)


class _ForkedIO(Popen2IO):
    """Pipes to a forked process, in place of one that execnet starts with `args`."""

    def __init__(self, server: forkserver.ForkServer, args: list[str], execmodel: object) -> None:
        (read, to_worker), (from_worker, write) = os.pipe(), os.pipe()
        ends = (
            Connection(read, writable=False),
            Connection(write, readable=False),
            Connection(os.dup(2), readable=False),
        )
        with ends[0], ends[1], ends[2]:
            task = (ends, args[-1], dict(os.environ), os.getcwd())
            self._process = get_context("forkserver").Process(target=_work, args=task)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
                self._process.start()
        process._children.discard(self._process)  # execnet waits for it
        super().__init__(os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb"), execmodel)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _work(files: tuple[Connection, ...], code: str, environment: dict[str, str], folder: str) -> None:
    """Do what `python -c CODE` would do with these files as stdin, stdout and stderr."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", 1, closefd=False)  # noqa: SIM115
    sys.modules["__main__"] = types.ModuleType("__main__")  # its forks would run the program that started this one
    try:
        exec(code, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()


class FewReports:
    """Sends of a test what the first process shows: half of the messages, each of which both of them encode."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if report.when == "call" or not report.passed:
                item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
