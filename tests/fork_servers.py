"""Processes that have imported what ranks need, and from which ranks are forked; those of pytest-xdist share them."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
OPENMP = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@functools.cache
def servers(preload: str) -> list[forkserver.ForkServer]:
    """Start, or find, the processes that have imported `preload`.

    Two, with hash seeds of their own: ranks that go through a set in their own order must not agree by chance. One is
    enough where a GPU is pretended.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    found = []
    for number in range(2 if preload == "tests.preload" else 1):
        found.append(
            _started(preload) if run is None else _shared(preload, _stem(run).with_suffix(f".{preload}{number}"))
        )
    return found


def remove_files(run: str) -> None:
    """Remove what the processes of a run of pytest-xdist found each other's servers by."""
    stem = _stem(run)
    for path in stem.parent.glob(f"{stem.name}.*"):
        path.unlink(missing_ok=True)


def _stem(run: str) -> Path:
    """Return the path that files of a run are called after: short, because sockets have 107 characters."""
    return Path(tempfile.gettempdir()) / f"megarl-forks-{run[:8]}"


def _started(preload: str) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([preload])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OPENMP.items():  # OpenMP reads these when it is loaded
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(_ROOT), prepend=os.pathsep)  # tests.preload is found from any folder
        server.ensure_running()
    return server


def _shared(preload: str, path: Path) -> forkserver.ForkServer:
    """Return the server that the file at `path` tells of; where there is none, start it and tell."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        told = file.read()
        if told:
            address, alive = json.loads(told)
            try:
                return _OfAnother(address, os.open(alive, os.O_WRONLY))
            except OSError:  # the process that started it has ended
                file.truncate(0)
        address = f"{path}.socket"  # in a folder of its own it would go with the process that starts it
        Path(address).unlink(missing_ok=True)
        with _address_is(address):
            server = _started(preload)
        file.write(json.dumps([address, f"/proc/{os.getpid()}/fd/{server._forkserver_alive_fd}"]))
        return server


@contextmanager
def _address_is(address: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "arbitrary_address", lambda family: address)
        yield


class _OfAnother(forkserver.ForkServer):
    """A server that another process of the run has started. It lives as long as one of them holds its pipe's end."""

    def __init__(self, address: str, alive: int) -> None:
        super().__init__()
        self._forkserver_address, self._forkserver_alive_fd = address, alive

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()
