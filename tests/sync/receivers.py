"""Receiver processes and a fleet of them, for tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet, Server


class ToldFleet(Fleet):
    """`told` keeps what synchronisation said."""

    def __init__(self, servers: list[Server], config: SGLangConfig) -> None:
        super().__init__(servers, config)
        self.told: list[tuple[str, int | str]] = []

    def acknowledge(self, server: Server, version: int) -> None:
        super().acknowledge(server, version)
        self.told.append((server.api.name, version))

    def mark_failed(self, server: Server, why: str) -> None:
        super().mark_failed(server, why)
        self.told.append((server.api.name, why))


def fleet_of(urls: list[str], *, external: bool = False) -> ToldFleet:
    """`external`: the servers outlive the trainer, so they are given a keeper."""
    servers = [Server(i, ServerApi(url, None, f"server {i}"), "catching_up") for i, url in enumerate(urls)]
    return ToldFleet(servers, SGLangConfig(urls=urls if external else []))


@contextlib.contextmanager
def receivers(folder: Path, count: int, faults: dict[int, str] | None = None) -> Iterator[list[str]]:
    """URLs of `count` receiver processes; `faults` as in tests/sync/faulty.py, by number."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    processes, urls = [], []
    try:
        for number in range(count):
            fault = (faults or {}).get(number)
            module = ["tests.sync.faulty"] if fault else ["megarl.benchmarks.sync.receiver"]
            command = [sys.executable, "-m", *module, str(folder / f"port{number}"), *([fault] if fault else [])]
            processes.append(subprocess.Popen(command, env=environment, cwd=folder))
        end = time.monotonic() + 60
        for number in range(count):
            while not (folder / f"port{number}").exists():
                if time.monotonic() > end or processes[number].poll() is not None:
                    raise AssertionError(f"receiver {number} did not start")
                time.sleep(0.05)
            urls.append(f"http://127.0.0.1:{(folder / f'port{number}').read_text()}")
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
