"""Runs in the servers' interpreter: imports what servers import, once, and forks them from itself.

    python forker.py FOLDER...       FOLDERs are on the path while it imports, the last one at its end

Each line of its standard input asks for a server, `{"file": FILE, "arguments": [...], "environment": {...}, "log":
FILE}`; the answer is a line with the process id. The server is an orphan from the start: whoever asked, and has
declared to take orphans (PR_SET_CHILD_SUBREAPER), is its parent, as if it had started `python FILE ARGUMENTS` itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import sys
import tempfile
import time
from pathlib import Path

#: What torchvision needs, the server, and the table of its models: with it, each model's file.
MODULES = (
    *("vision_operators", "sglang.launch_server", "sglang.srt.entrypoints.http_server"),
    "sglang.srt.models.registry",
)


def preload(folders: list[str]) -> None:
    """Import what takes a server nine of its eleven seconds of CPU time.

    Servers do not look through it for garbage: that would copy its pages, in each of their processes.
    """
    gc.disable()  # looking for garbage among what modules make takes a sixth of the time
    path = list(sys.path)
    sys.path[:] = [*folders[:-1], *path, folders[-1]]
    for name in MODULES:
        importlib.import_module(name)
    sys.path[:] = path
    gc.collect()
    gc.freeze()
    gc.enable()


def serve(request: dict) -> None:
    """Become the server."""
    file = request["file"]
    deadline = time.monotonic() + 60
    while os.getppid() != int(request["environment"]["MEGARL_SERVER_PARENT"]):  # the process between them has to end
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.01)
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(os.open(request["log"], os.O_WRONLY | os.O_APPEND), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # was the forker's
    random.seed()
    sys.argv = [file, *request["arguments"]]
    sys.path.insert(0, str(Path(file).parent))
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        gc.unfreeze()  # libraries would report what is never freed
        sys.stdout.flush()
        sys.stderr.flush()


def fork(request: dict) -> int | None:
    """Process id of the server; None in the server itself, when it has ended."""
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        server = os.fork()
        if server:
            os.write(writing, str(server).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        serve(request)
        return None
    os.waitpid(between, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return int(answer.read(20))


def main() -> None:
    preload(sys.argv[1:])
    while line := sys.stdin.readline():
        pid = fork(json.loads(line))
        if pid is None:
            return
        print(pid, flush=True)


if __name__ == "__main__":
    main()
