"""Receiver processes, a fleet of them, and the trainer's end, for tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet, Server
from tests.dist import start, world
from tests.forked import fork_relays


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


def fleet_of(urls: list[str], *, external: bool = False, colocated: bool = False) -> ToldFleet:
    """`external`: the servers outlive the trainer, so they are given a keeper; `colocated`: on the trainer's GPUs."""
    servers = [Server(i, ServerApi(url, None, f"server {i}"), "catching_up") for i, url in enumerate(urls)]
    return ToldFleet(servers, SGLangConfig(urls=urls if external else [], colocated=colocated))


def weight_sync(
    chunks: Sequence[Any], fleet: Fleet, config: Any, run_dir: str | Path, tp: int = 1, attention_dp: int = 1
):
    """Weights, or separate adapters, from all ranks of this world to a fleet whose servers have `tp` ranks."""
    from megarl.rollout.sglang.layout import ServerLayout
    from megarl.rollout.sglang.receiver import SglangReceivers
    from megarl.sync.adapters import AdapterSync
    from megarl.sync.updater import WeightSync

    # Programs: test_relay_process.py. The process of tests may have a manager of shared memory, which no fork can use.
    if multiprocessing.parent_process() is not None:
        fork_relays()
    servers = SglangReceivers(fleet, ServerLayout.of(chunks[0].hf_config, tp, attention_dp=attention_dp))
    kind = AdapterSync if config.adapters == "separate" else WeightSync
    return kind(chunks, servers, config, Path(run_dir), world())


def server_receiver(api: Any, number: int = 0, **layout: int):
    """One server of a tiny model as the trainer sees it."""
    from megarl.rollout.sglang.layout import ServerLayout
    from megarl.rollout.sglang.receiver import SglangReceiver
    from tests.sync.layouts import config

    return SglangReceiver(Server(number, api, "current"), ServerLayout.of(config("qwen3_moe"), **layout))


@contextlib.contextmanager
def receivers(folder: Path, count: int, faults: dict[int, str] | None = None) -> Iterator[list[str]]:
    """URLs of `count` receiver processes; `faults` as in tests/sync/faulty.py, by number.

    What they print is in `folder`/portN.log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes, urls = [], []
    try:
        for number in range(count):
            task = (str(folder / f"port{number}"), (faults or {}).get(number), dict(os.environ))
            processes.append(start(number, _receive, task, "tests.preload"))
        end = time.monotonic() + 240
        for number in range(count):
            while not (folder / f"port{number}").exists():
                if time.monotonic() > end or not processes[number].is_alive():
                    raise AssertionError(f"receiver {number} did not start")
                time.sleep(0.05)
            urls.append(f"http://127.0.0.1:{(folder / f'port{number}').read_text()}")
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.join(10)
        assert not any(process.is_alive() for process in processes)


def _receive(port_file: str, fault: str | None, environment: dict[str, str]) -> None:
    """The life of a receiver, in a process that is forked with its imports done."""
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    log = os.open(f"{port_file}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    import torch

    from megarl.benchmarks.sync.receiver import Receiver, serve
    from tests.sync.faulty import FaultyReceiver

    torch.set_num_threads(1)
    serve(Receiver() if fault is None else FaultyReceiver(fault), Path(port_file))
