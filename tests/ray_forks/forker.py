"""The process that Ray's workers are forked from."""

from __future__ import annotations

import functools
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.forked import fork_scorers, in_child


def serve(path: str) -> None:
    """Fork a worker for whoever asks at this socket, until the process that wanted it is gone."""
    for name in ("jsonschema", "requests", "msgpack", "yaml", "google.protobuf", "megarl.launchers.ray"):
        __import__(name)
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
            request, files = received(client)
            if not os.fork():
                for number, file in enumerate(files):
                    os.dup2(file, number)
                in_child(request["environment"], (), functools.partial(_work, request["folder"], request["arguments"]))
            client.close()
            for file in files:
                os.close(file)


def received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a request, a line of JSON, and the files that come with it."""
    data, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 20)
    return json.loads(data), list(files)


def _work(folder: str, arguments: list[str]) -> None:
    """Become what Ray would have started."""
    os.setpgrp()  # Ray ends the process groups of its workers
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    file = Path(ray.origin).with_name("_private") / "workers" / "default_worker.py"
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [str(file.parent), *given, *(one for one in sys.path[1:] if one not in given)]
    random.seed()
    fork_scorers()
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = [str(file), *arguments]
    runpy.run_path(str(file), run_name="__main__")
