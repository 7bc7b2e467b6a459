"""Servers of this process are forked from one that has imported what they import: 3 s instead of 17 until they answer.

They are the product's servers in everything else: the same file with the same arguments and environment, children of
this process in groups of their own. What their command line has to show is tested with servers that are not forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest

from megarl.rollout.sglang import server
from megarl.system.compat.sglang import LOADERS, STAND_INS, find_python, server_environment

_FORKER = Path(__file__).with_name("forker.py")
_PR_SET_CHILD_SUBREAPER = 36
#: Variables of one server, read when it starts, what Megatron, torch and Ray set in this process, and pytest's of one
#: test. They make no other process to fork from.
_OWN = (
    *("MEGARL_SERVER_", "TMPDIR", "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"),
    *("GLOO_SOCKET_IFNAME", "NVTE_", "TORCHINDUCTOR_CACHE_DIR", "RAY_", "PYTEST_"),
)
_ADOPTING = threading.Lock()


@contextlib.contextmanager
def forked_servers() -> Iterator[None]:
    """Servers that this process starts from here on are forked; on Linux, elsewhere they start as always."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(server, "_start_process", _fork)
        yield


def run_program(file: Path, arguments: Sequence[str], log: Path) -> int | None:
    """Exit code of a program of the servers' interpreter, forked as servers are; what it prints is in `log`."""
    python = find_python(None, cuda=False)
    environment = server_environment(os.environ, python=python, api_key="", instance="", cuda=False)
    with forked_servers(), log.open("ab") as output:
        return server._start_process([str(python), str(file), *arguments], environment, output).wait()


class ForkedProcess:
    """What ServerProcess uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _fork(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> ForkedProcess:
    python, file, *arguments = command
    common = tuple(sorted((name, value) for name, value in environment.items() if not name.startswith(_OWN)))
    forker = _forker(python, common)
    assert forker.stdin is not None
    assert forker.stdout is not None
    with _adopting_orphans():
        request = {"file": file, "arguments": [str(part) for part in arguments]}
        request |= {"environment": dict(environment), "log": log.name}
        forker.stdin.write(json.dumps(request) + "\n")
        forker.stdin.flush()
        answer = forker.stdout.readline()
        assert answer, f"the process that servers are forked from ended with {forker.wait()}"
        deadline = time.monotonic() + 60
        while psutil.Process(int(answer)).ppid() != os.getpid():
            assert time.monotonic() < deadline, "the server did not become a child of this process"
            time.sleep(0.01)
    return ForkedProcess(int(answer))


@functools.cache
def _forker(python: str, environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """It ends with this process, whose end of its input is closed then. Variables are read by what it imports."""
    return subprocess.Popen(
        [python, str(_FORKER), *(str(folder) for folder in (LOADERS, *STAND_INS))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(environment),
        text=True,
    )


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Orphans among the descendants of this process become its children; otherwise the system's first process's."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _ADOPTING:
        assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        try:
            yield
        finally:
            assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
