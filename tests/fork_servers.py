"""Processes that have imported what ranks need, and from which ranks are forked; those of pytest-xdist share them.

Each of them but the second of tests.preload is itself forked, from one that has imported PyTorch and transformers:
these take 3.6 of its 5.2 CPU-seconds.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver, get_context, process, resource_tracker, util
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
OPENMP = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
_TORCH = "tests.preload_torch"


@functools.cache
def servers(preload: str) -> list[forkserver.ForkServer]:
    """Start, or find, the processes that have imported `preload`.

    Two, with hash seeds of their own: ranks that go through a set in their own order must not agree by chance. One is
    enough where a GPU is pretended.
    """
    return [_server(preload, number) for number in range(2 if preload == "tests.preload" else 1)]


def first_server(preload: str) -> forkserver.ForkServer:
    """Start, or find, the first of `servers`."""
    return _server(preload, 0)


def _server(preload: str, number: int) -> forkserver.ForkServer:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return _started(preload, number)
    return _shared(preload, number, _stem(run).with_suffix(f".{preload}{number}"))


@functools.cache
def _torch_server() -> forkserver.ForkServer:
    """Start, or find, the process that the others are forked from."""
    return _server(_TORCH, 0)


def remove_files(run: str) -> None:
    """Remove what the processes of a run of pytest-xdist found each other's servers by."""
    stem = _stem(run)
    for path in stem.parent.glob(f"{stem.name}.*"):
        path.unlink(missing_ok=True)


def _stem(run: str) -> Path:
    """Return the path that files of a run are called after: short, because sockets have 107 characters."""
    return Path(tempfile.gettempdir()) / f"megarl-forks-{run[:8]}"


def _started(preload: str, number: int) -> forkserver.ForkServer:
    server, is_forked = forkserver.ForkServer(), preload != _TORCH and number == 0
    server.set_forkserver_preload([preload])
    with pytest.MonkeyPatch.context() as patch:
        if is_forked:
            start = functools.partial(_fork_server, _torch_server(), preload)
            resource_tracker.ensure_running()  # it is started by the same function
            patch.setattr(util, "spawnv_passfds", start)
        for name, value in OPENMP.items():  # OpenMP reads these when it is loaded
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(_ROOT), prepend=os.pathsep)  # tests.preload is found from any folder
        server.ensure_running()
    if is_forked:  # it is no child of this process, which could not ask whether it has ended
        return _OfAnother(server._forkserver_address, server._forkserver_alive_fd)
    return server


def _fork_server(
    torch_server: forkserver.ForkServer, preload: str, exe: str, args: list[str], descriptors: list[int]
) -> int:
    """Fork the server, in place of starting an interpreter with `args`; return its process id.

    Args:
        descriptors: its listening socket, and the pipe whose end tells it to end.
    """
    listener = socket.socket(fileno=os.dup(descriptors[0]))
    alive = connection.Connection(os.dup(descriptors[1]), writable=False)
    server = get_context("forkserver").Process(target=_serve, args=(listener, alive, preload, sys.path))
    with pytest.MonkeyPatch.context() as patch, listener, alive:
        patch.setattr(forkserver, "connect_to_new_process", torch_server.connect_to_new_process)
        server.start()
    process._children.discard(server)  # it ends with the last process that uses it: nobody waits for it
    assert server.pid is not None
    return server.pid


def _serve(listener: socket.socket, alive: connection.Connection, preload: str, path: list[str]) -> None:
    """Do what a new interpreter would do that is started as a server of forks."""
    sys.path[:] = path
    os.close(forkserver._forkserver._forkserver_alive_fd)  # so the other server ends when the tests do
    forkserver.main(listener.detach(), os.dup(alive.fileno()), [preload])


def _shared(preload: str, number: int, path: Path) -> forkserver.ForkServer:
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
            server = _started(preload, number)
        file.write(json.dumps([address, f"/proc/{os.getpid()}/fd/{server._forkserver_alive_fd}"]))
        return server


@contextmanager
def _address_is(address: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "arbitrary_address", lambda family: address)
        yield


class _OfAnother(forkserver.ForkServer):
    """A server that another process has started. It lives as long as one process holds its pipe's end."""

    def __init__(self, address: str, alive: int) -> None:
        super().__init__()
        self._forkserver_address, self._forkserver_alive_fd = address, alive

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()
