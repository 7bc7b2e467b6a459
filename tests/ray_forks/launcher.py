"""For processes that start a Ray: its workers are to be forked. Imports nothing that a launcher does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FORKER = "MEGARL_TEST_RAY_FORKER"  # the forker's socket, in the environment of launchers and node managers
WORKER = str(Path(__file__).with_name("worker.py"))


def accept() -> None:
    """Let a launcher, which this process is, fork the workers of a Ray of its own, if that is offered."""
    if FORKER not in os.environ:
        return
    from megarl.launchers import ray

    keep_out = ray._restrict_clients

    def then_choose() -> None:
        keep_out()  # before Ray is imported
        choose_worker()

    ray._restrict_clients = then_choose


def choose_worker() -> None:
    """Start `WORKER` where a Ray that this process starts would start its own file."""
    from ray._private.parameter import RayParams

    update: Any = RayParams.update_if_absent

    def with_own_worker(self: RayParams, **settings: Any) -> None:
        update(self, **settings | ({"worker_path": WORKER} if "worker_path" in settings else {}))

    RayParams.update_if_absent = with_own_worker
