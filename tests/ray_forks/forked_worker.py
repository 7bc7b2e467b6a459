"""A worker of Ray in a fork of a process that has its imports done."""

from __future__ import annotations

import functools
import os
import random
import runpy
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from tests.forked import fork_scorers, in_child
from tests.forker import received

#: What a worker imports beside torch and Megatron.
IMPORTS = ("jsonschema", "requests", "msgpack", "yaml", "google.protobuf", "megarl.launchers.ray")


def fork_worker(client: socket.socket) -> NoReturn:
    """Become the worker that is asked for."""
    request, files = received(client)
    for number, file in enumerate(files):
        os.dup2(file, number)
    in_child(request["environment"], (), functools.partial(_work, request["folder"], request["arguments"]))


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
