"""Updates from shard to shard from four trainer ranks to eight servers, which `megarl bench sync` measures, too.

    python -m megarl.benchmarks.sync.many URL ...     is one of the trainer ranks, which `many_seconds` starts

Every trainer rank holds a quarter of the rows of each tensor, and every server all tensors, as with tp 1. The servers
run on the trainer's machine, so each gets all bytes from the trainer and gathers nothing. All messages cross the
loopback interface, which carries `senders x model` bytes in each direction of every update.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.benchmarks.sync.measure import BUCKET_MB, DEADLINE_S, SIDE, receiver_process

if TYPE_CHECKING:
    from megarl.rollout.sglang.receiver import SglangReceiver
    from megarl.sync.shards.transfer import ShardTransfer
    from megarl.system.comm import WorkerGroup

SENDERS, RECEIVERS = 4, 8
TENSORS = 50  # matrices of SIDE x SIDE in bfloat16: 100 MB
UPDATES = 3  # measured, after a first one


def many_seconds(folder: Path) -> dict[str, float]:
    """Return the least wall seconds of an update (`s`), the bytes that all trainer ranks send (`bytes`), and the
    CPU-seconds of the trainer's and the servers' processes for an update, on average (`cpu_s`)."""
    import psutil

    from megarl.system.processes import free_port

    with contextlib.ExitStack() as stack:
        receivers = [stack.enter_context(receiver_process(folder, number)) for number in range(RECEIVERS)]
        urls = [receiver.url for receiver, _ in receivers]
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
                               "WORLD_SIZE": str(SENDERS), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        command = [sys.executable, "-m", __name__, *urls]
        ranks = [
            subprocess.Popen(
                command, env=shared | {"RANK": str(rank)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(SENDERS)
        ]
        try:
            lines = [json.loads(_answer(rank)) for rank in ranks]  # after the first update
            servers = [psutil.Process(process.pid) for _, process in receivers]
            before = [sum(server.cpu_times()[:2]) for server in servers]
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write("go\n")
                rank.stdin.flush()
            lines = [json.loads(_answer(rank)) for rank in ranks]
            used = sum(sum(server.cpu_times()[:2]) for server in servers) - sum(before)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return {
        "s": max(line["s"] for line in lines),
        "bytes": sum(line["bytes"] for line in lines),
        "cpu_s": (sum(line["cpu_s"] for line in lines) + used) / UPDATES,
    }


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise RuntimeError("the measurement failed: a trainer rank ended early")
    return line


def _update(
    transfer: ShardTransfer, receivers: Sequence[SglangReceiver], version: int, world: WorkerGroup
) -> tuple[float, int]:
    """Update all servers; return seconds and the bytes that this rank has sent. Collective."""
    from megarl.sync.protocol import ReceiverUpdate
    from megarl.sync.receiver import UpdateStep
    from megarl.sync.sender import SyncReport

    led = [receiver for receiver in receivers if receiver.number % world.size == world.rank]
    step, report = UpdateStep(f"update {version}", DEADLINE_S), SyncReport(version, "shards")
    updates = [ReceiverUpdate(receiver, str(version), "abort", True, step) for receiver in led]
    world.barrier()
    start = time.perf_counter()
    for update in updates:
        update.open()
    transfer.run(receivers, {receiver.number for receiver in led}, report)
    for update in updates:
        update.load(lambda _: None)
        update.reopen()
    if report.failed:
        raise RuntimeError(next(iter(report.failed.values())))
    world.barrier()
    return time.perf_counter() - start, report.nbytes


def main(urls: Sequence[str]) -> None:
    """Be one of the trainer's ranks: update the servers once, print a line, wait for one, update them again."""
    import torch
    import torch.distributed as dist

    from megarl.benchmarks.sync.measure import own_shards, receiver_at
    from megarl.sync.shards.machine import machine_name
    from megarl.sync.shards.transfer import ShardTransfer
    from megarl.sync.transports.shards import planner
    from megarl.system.comm import team_world

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = team_world(DEADLINE_S)
    receivers = [receiver_at(url, number) for number, url in enumerate(urls)]
    part = (SIDE // SENDERS, SIDE)
    weights = {f"model.layers.{i}.weight": torch.randn(part).to(torch.bfloat16) for i in range(TENSORS)}
    own, rounds = own_shards(weights, machine_name(), SENDERS), planner(BUCKET_MB * 10**6)
    transfer = ShardTransfer(own, rounds, world, "many", DEADLINE_S, "127.0.0.1")
    _update(transfer, receivers, 1, world)
    print(json.dumps({}), flush=True)
    sys.stdin.readline()
    cpu = time.process_time()
    results = [_update(transfer, receivers, version, world) for version in range(2, UPDATES + 2)]
    values: dict[str, Any] = {"s": min(seconds for seconds, _ in results), "bytes": results[0][1]}
    print(json.dumps(values | {"cpu_s": time.process_time() - cpu}), flush=True)
    sys.stdin.readline()
    os._exit(0)  # a communication thread can abort the interpreter's teardown


if __name__ == "__main__":
    main(sys.argv[1:])
