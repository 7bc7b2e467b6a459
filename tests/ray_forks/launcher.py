"""For processes that start a Ray: its workers are to be forked. Imports nothing that a launcher does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FORKER = "MEGARL_TEST_RAY_FORKER"  # the forker's socket, in the environment of launchers and node managers
WORKER = str(Path(__file__).with_name("worker.py"))
WORKER_PATHS = {"worker_path": WORKER, "setup_worker_path": WORKER}
_AGENT = str(Path(__file__).with_name("agent.py"))


def accept() -> None:
    """Let a launcher, which this process is, fork the workers of a Ray of its own, if that is offered."""
    if FORKER not in os.environ:
        return
    from megarl.launchers import ray

    keep_out, chosen = ray._restrict_clients, list[bool]()

    def then_choose() -> None:
        keep_out()  # before Ray is imported
        if not chosen:  # else it is another Ray of this launcher
            choose_programs()
            chosen.append(True)

    ray._restrict_clients = then_choose


def choose_programs() -> None:
    """Start `WORKER` and `_AGENT` where a Ray that this process starts would start its own files."""
    choose_worker()
    choose_agent()


def choose_worker() -> None:
    """Start `WORKER` where a Ray that this process starts would start its own file."""
    from ray._private.parameter import RayParams

    update: Any = RayParams.update_if_absent

    def with_own_worker(self: RayParams, **settings: Any) -> None:
        update(self, **settings | (WORKER_PATHS if "worker_path" in settings else {}))

    RayParams.update_if_absent = with_own_worker


def choose_agent() -> None:
    """Start `_AGENT` in place of the agents of nodes that this process starts."""
    from ray._private import ray_constants, services

    start: Any = services.start_ray_process
    theirs = subprocess.list2cmdline([sys.executable, "-u", os.path.join(services.RAY_PATH, "dashboard", "agent.py")])
    ours = subprocess.list2cmdline([sys.executable, "-ISu", _AGENT])

    def with_own_agent(command: list[str], process_type: str, **settings: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            replaced = [part.replace(theirs, ours) for part in command]
            assert replaced != command, "Ray's command of its agent has changed"
            command = replaced
        return start(command, process_type, **settings)

    services.start_ray_process = with_own_agent
