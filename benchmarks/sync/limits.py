"""The limits of this machine: seconds to pass bytes to another process by shared memory, TCP and a gloo broadcast.

`python -m megarl.benchmarks.sync.limits memory|tcp|gloo ...` is the other process, which these functions start.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, shared_memory

import torch
import torch.distributed as dist

REPEATS = 10


@contextlib.contextmanager
def _child(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start the other process, and kill it after the block."""
    command = [sys.executable, "-m", __name__, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def _best(call: Callable[[], None]) -> float:
    """Return the minimum seconds over several calls; the first call is not counted."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _await_line(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    if not child.stdout.readline():
        raise RuntimeError("the measurement failed: its second process ended early")


def memory_seconds(data: torch.Tensor, bucket: int) -> float:
    """Copy `data`, uint8, through two shared segments of `bucket` bytes: one is filled while the other is emptied."""
    segments = [shared_memory.SharedMemory(create=True, size=bucket) for _ in range(2)]
    views = [torch.frombuffer(segment.buf, dtype=torch.uint8)[:bucket] for segment in segments]
    parts = list(enumerate(data.split(bucket)))

    def call() -> None:
        assert child.stdin is not None
        for number, part in parts:
            if number >= 2:
                _await_line(child)
            views[number % 2][: len(part)].copy_(part)
            child.stdin.write(f"{number % 2} {len(part)} {number * bucket}\n".encode())
            child.stdin.flush()
        for _ in parts[:2]:
            _await_line(child)

    try:
        with _child("memory", len(data), bucket, *(segment.name for segment in segments)) as child:
            _await_line(child)
            return _best(call)
    finally:
        for segment in segments:
            segment.unlink()


def compare_seconds(data: torch.Tensor) -> float:
    """Read `data` and an equal tensor once each and compare them: no delta can be found in less."""
    other = data.clone()

    def call() -> None:
        if not torch.equal(data.view(torch.int64), other.view(torch.int64)):
            raise RuntimeError("a copy differs from its original")

    return _best(call)


def tcp_seconds(data: torch.Tensor) -> float:
    """Send `data` over a loopback connection, until the other process confirms all of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    with _child("tcp", listener.getsockname()[1], len(data)):
        sock, _ = listener.accept()

        def call() -> None:
            sock.sendall(data.numpy().data)
            sock.recv(1)

        return _best(call)


def gloo_seconds(data: torch.Tensor, bucket: int) -> float:
    """Broadcast `data` to one process in parts of `bucket` bytes."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)

    def call() -> None:
        for part in data.split(bucket):
            dist.broadcast(part, src=0)
        dist.barrier()

    with _child("gloo", store.port, len(data), bucket):
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)
        try:
            return _best(call)
        finally:
            dist.destroy_process_group()


def _empty_segments(size: int, bucket: int, names: list[str]) -> None:
    segments = [shared_memory.SharedMemory(name) for name in names]
    for segment in segments:  # Python would remove these segments at exit, but the process that created them does so
        resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    views = [torch.frombuffer(segment.buf, dtype=torch.uint8) for segment in segments]
    target = torch.zeros(size, dtype=torch.uint8)
    print("ready", flush=True)
    for line in sys.stdin:
        which, length, start = map(int, line.split())
        target[start : start + length].copy_(views[which][:length])
        print("done", flush=True)


def _receive(port: int, size: int) -> None:
    sock = socket.create_connection(("127.0.0.1", port))
    target = memoryview(bytearray(size))
    while True:
        got = 0
        while got < size:
            got += sock.recv_into(target[got:])
        sock.sendall(b"1")


def _follow(port: int, size: int, bucket: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    target = torch.zeros(size, dtype=torch.uint8)
    for _ in range(REPEATS + 1):
        for part in target.split(bucket):
            dist.broadcast(part, src=0)
        dist.barrier()
    os._exit(0)  # a communication thread can abort the interpreter's teardown


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, *rest = sys.argv[1:]
    if kind == "memory":
        _empty_segments(int(rest[0]), int(rest[1]), rest[2:])
    elif kind == "tcp":
        _receive(int(rest[0]), int(rest[1]))
    else:
        _follow(int(rest[0]), int(rest[1]), int(rest[2]))
