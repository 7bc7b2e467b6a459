"""A process that has its imports done and forks itself for whoever asks at its socket.

    path = forker(work)        # work(client), in a fork for every client, reads what is asked for by `received(client)`

Who asks sends a line of JSON, and files with it: tests/ray_forks/worker.py and tests/launchers/forking_python.py.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

from tests import dist

_STARTS_S = 120.0


@functools.cache
def forker(work: Callable[[socket.socket], NoReturn], *imports: str) -> str:
    """Start it, once for these arguments; it ends with this process. Returns the path of its socket.

    Args:
        work: a function of a module.
        imports: modules that `work` needs, beside those of tests/preload.py.
    """
    path = os.path.join(_folder().name, f"{work.__module__}.{work.__qualname__}")
    process = dist.start(0, _serve, (path, work, imports), "tests.preload")
    deadline = time.monotonic() + _STARTS_S
    while not os.path.exists(path):
        assert process.is_alive(), f"the process that forks {work} has ended"
        assert time.monotonic() < deadline, f"the process that forks {work} does not answer"
        time.sleep(0.02)
    return path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="megarl-forker-")  # the path of a socket has 108 bytes at most


def _serve(path: str, work: Callable[[socket.socket], NoReturn], imports: tuple[str, ...]) -> None:
    """Fork for whoever asks at this socket, until the process that wanted it is gone."""
    for name in imports:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen(64)
        os.rename(f"{path}.new", path)
        while os.getppid() == parent:
            if not select.select([server], [], [], 1.0)[0]:
                continue
            client, _ = server.accept()
            if not os.fork():
                server.close()
                work(client)
            client.close()


def received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a request, a line of JSON, and the files that come with it."""
    data, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 20)
    return json.loads(data), list(files)
