"""The process that Ray's workers are forked from."""

from __future__ import annotations

import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn


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
            request, files = _received(client)
            if not os.fork():
                server.close()
                client.close()
                _work(request, files)
            client.close()
            for file in files:
                os.close(file)


def _received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 20)
    return json.loads(data), list(files)


def _work(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Become what Ray would have started."""
    code = 1
    try:
        os.setpgrp()  # Ray ends the process groups of its workers
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        ray = find_spec("ray")
        assert ray is not None
        assert ray.origin is not None
        file_of_ray = Path(ray.origin).with_name("_private") / "workers" / "default_worker.py"
        given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        sys.path[:] = [str(file_of_ray.parent), *given, *(one for one in sys.path[1:] if one not in given)]
        random.seed()
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        sys.argv = [str(file_of_ray), *request["arguments"]]
        runpy.run_path(str(file_of_ray), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
