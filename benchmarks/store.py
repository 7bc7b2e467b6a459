"""The store between teams: `python -m megarl.benchmarks.store`.

`core`: its state in one process, driven by 512 workers that draw and 512 that score. A step of 1,024 groups of 8
samples goes there, and what they make of it comes back. CPU-seconds per step, of the core with its journal and of what
drives it, what is held after many steps, and the CPU-seconds of a minute in which all of them wait. `ready`: the same
number of groups with `async.order=as_ready`, by 512 workers or by 8, in the calls that these make in a minute
(`megarl.disaggregated.pace`) for groups of log-normal times.

`replay`: seconds in which a store that died reads a million of these events from its journal. That of a run is shorter,
because a snapshot of the state takes the place of the calls.

`clients`: the same steps between 16 processes, 8 of each team; as ready all calls of a minute one after the other.
CPU-seconds of the store's process per step, and of the looks of a minute: those that draw look ten times a second
whether somebody wants the weights to be replaced.

`ray`: a giver and a taker, each a process of its own. Seconds from the first byte given to the last byte read, of bytes
and of a batch of 512 groups of 16 samples, beside copying as many bytes from one gigabyte of memory to another one
through shared memory, in the same run, by one thread. All of that memory has been written to before: a worker uses that
of a step for the next one (`megarl.data.buffer_pool`). In a first step it is new: `new`, of a batch and of the copy, is
into memory that the reader gets from the kernel. The seconds are those of the fastest batch: `give` until the store has
it, `fetch` until the reader sees it in shared memory, `read` until it is a batch.

`nodes`: the same between two Ray nodes on this machine, each with an object store of its own, beside one loopback
connection between two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megarl.benchmarks.store_calls import measure_clients, measure_core, measure_replay, teams
from megarl.disaggregated.buffer.core import GroupInfo

CHUNKS, CHUNK_BYTES = 32, 32 << 20
BATCH_GROUPS, BATCH_SAMPLES, TOKENS = 512, 16, 5_000
ROUNDS = 8


def make_batch() -> Any:
    """Return about a gigabyte, as a rollout makes it: log-normal lengths around 5,000 tokens, of which 500 are the
    prompt."""
    import torch

    from megarl.data.batch import Batch, Jagged

    count = BATCH_GROUPS * BATCH_SAMPLES
    draw = torch.randn(count, generator=torch.Generator().manual_seed(1))
    lengths = (TOKENS * torch.exp(0.4 * draw)).long().clamp(TOKENS // 5, 2 * TOKENS)
    ids = Jagged.from_lengths(torch.arange(int(lengths.sum())), lengths)
    prompts = Jagged.from_lengths(torch.arange(count * (TOKENS // 10)), [TOKENS // 10] * count)
    fields: dict[str, Any] = {
        "prompt_ids": prompts,
        "response_ids": ids,
        "rollout_logp": ids.like(-torch.rand(len(ids.values))),
        "old_logp": ids.like(-torch.rand(len(ids.values))),
        "ref_logp": ids.like(-torch.rand(len(ids.values))),
        "response_mask": ids.like(torch.ones(len(ids.values), dtype=torch.bool)),
        "score": torch.rand(count),
    }
    names = [f"g{k // BATCH_SAMPLES}" for k in range(count)]
    return Batch(fields, {"uid": names, "sample_id": [f"{name}#{k}" for k, name in enumerate(names)]})


class Process:
    """One end of the way; a Ray actor."""

    def __init__(self, team: str) -> None:
        import numpy as np
        import torch

        from megarl.data.wire import Block, Span
        from megarl.disaggregated.buffer.client import StoreClient

        torch.set_num_threads(1)
        self._client = StoreClient.connect("bench", team, 0, 60.0)
        self._target = np.zeros((CHUNKS, CHUNK_BYTES), np.uint8)
        self._batch: Any = make_batch() if team == "train" else None
        chunks = range(CHUNKS if team == "train" else 0)
        self._bytes = [Span(Block((np.full(CHUNK_BYTES, k, np.uint8),)), 0, 1) for k in chunks]

    def give(self, step: int, batch: bool) -> tuple[float, float, int]:
        """Hand over a step; returns when it began and ended, and its bytes."""
        size = BATCH_SAMPLES if batch else 1
        groups = [
            GroupInfo(f"g{k}", k, tuple(f"g{k}#{i}" for i in range(size)), 1)
            for k in range(BATCH_GROUPS if batch else CHUNKS)
        ]
        places = [range(k * size, (k + 1) * size) for k in range(len(groups))]
        start = time.time()
        payloads = self._batch.to_blocks(places, [0] * len(groups)) if batch else self._bytes
        given = self._client.give(step, "rollout>score", groups, payloads)
        end = time.time()
        self._client.done(step)
        return start, end, given

    def take(self, step: int, batch: bool, new: bool) -> tuple[float, float, int]:
        """Read it, every byte, into `new` memory; returns when it was there and when it was done, and the bytes."""
        import numpy as np

        from megarl.data.batch import Batch
        from megarl.data.buffer_pool import buffer_pool

        if new:
            buffer_pool.give_back()
        mine = self._client.assignment(step, "rollout", 0)
        payloads = self._client.fetch(step, "rollout>score", [group.uid for group in mine])
        there = time.time()
        if batch:
            Batch.from_blocks(payloads)
        else:
            for target, payload in zip(self._target, payloads, strict=True):
                np.copyto(target, payload.block.parts[0])
        end = time.time()
        self._client.done(step)
        return there, end, sum(map(len, {payload.block for payload in payloads}))


class Copy:
    """The copy from memory into mapped shared memory, and out of it into other memory."""

    def __init__(self, size: int) -> None:
        from multiprocessing.shared_memory import SharedMemory

        import numpy as np

        self._source, self._target = np.full(size, 1, np.uint8), np.zeros(size, np.uint8)
        self._memory = SharedMemory(create=True, size=size)
        assert self._memory.buf is not None, "it is open"
        self._view: Any = np.frombuffer(self._memory.buf, np.uint8)[:size]
        self._view[:] = 0

    def seconds(self, new: bool = False) -> float:
        """Return the seconds of both copies; the second is into `new` memory."""
        import numpy as np

        from megarl.data.buffer_pool import BufferPool

        start = time.perf_counter()
        np.copyto(self._view, self._source)
        np.copyto(BufferPool().take(len(self._source)) if new else self._target, self._view)
        return time.perf_counter() - start

    def close(self) -> None:
        """Give the memory back."""
        self._view = None
        self._memory.close()
        self._memory.unlink()


class Way(NamedTuple):
    """The bytes that went from a giver to a taker: seconds of all, of its parts, and of copying as many."""

    size: int
    seconds: float
    give_s: float
    fetch_s: float
    read_s: float
    copy_s: float


def shares(ways: dict[str, list[Way]]) -> dict[str, float]:
    """Return the seconds of the fastest of each kind over those of the fastest copy; the first of each maps the
    memory."""
    result = {}
    for kind, rounds in ways.items():
        best = min(rounds[1:], key=lambda way: way.seconds / way.size)
        copy = min(way.copy_s / way.size for way in rounds)
        result[f"{kind}_gb_per_s"] = best.size / best.seconds / 1e9
        result[f"{kind}_copy_gb_per_s"] = 1 / copy / 1e9
        result[f"{kind}_share_of_copying_speed"] = copy / (best.seconds / best.size)
        if kind != "bytes":
            result |= {f"{kind}_{part}": getattr(best, part) for part in ("give_s", "fetch_s", "read_s")}
    return result


def measure_ray() -> dict[str, float]:
    """Return seconds of the way of bytes, of a batch, and of copying as much; the least of some rounds, taken in
    turn."""
    import ray

    size = CHUNKS * CHUNK_BYTES
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=3 * size, log_to_driver=False)
    copy = Copy(size)
    ways = drive(copy.seconds)
    copy.close()
    ray.shutdown()
    return {"gb": ways["batch"][0].size / 1e9, **shares(ways)}


def measure_nodes() -> dict[str, float]:
    """Return the same from one Ray node to another one, and of a connection."""
    import ray
    import torch
    from ray.cluster_utils import Cluster

    from megarl.benchmarks.sync.limits import tcp_seconds

    size = CHUNKS * CHUNK_BYTES
    node = {"num_cpus": 1, "object_store_memory": 3 * size, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "resources": {"train": 1}})
    cluster.add_node(**node, resources={"score": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    least = tcp_seconds(torch.ones(size, dtype=torch.uint8))
    ways = drive(lambda new: least, apart=True)
    ray.shutdown()
    cluster.shutdown()
    return {"gb": ways["batch"][0].size / 1e9, **shares(ways)}


def drive(copy_s: Callable[[bool], float], apart: bool = False) -> dict[str, list[Way]]:
    """Take every way several times, in turn.

    Args:
        copy_s: seconds of copying all chunks, into new memory or not.
        apart: the giver's and the taker's nodes have resources of their names.
    """
    import ray

    from megarl.disaggregated.buffer.actor import start_store

    folder = tempfile.TemporaryDirectory()
    handle = start_store("bench", teams(1), max(CHUNKS, BATCH_GROUPS), "dealt", Path(folder.name) / "journal")
    make = ray.remote(Process)
    giver, taker = (
        make.options(num_cpus=0, resources={team: 1} if apart else None).remote(team) for team in ("train", "score")
    )
    ways: dict[str, list[Way]] = {"bytes": [], "batch": [], "new": []}
    for step in range(3 * (ROUNDS + 1)):
        kind = list(ways)[step % 3]
        reading = taker.take.remote(step, kind != "bytes", kind == "new")
        start, given, gave = ray.get(giver.give.remote(step, kind != "bytes"))
        there, end, read = ray.get(reading)
        assert read == gave, "every byte is read once"
        copied = gave / (CHUNKS * CHUNK_BYTES) * copy_s(kind == "new")
        ways[kind].append(Way(gave, end - start, given - start, there - given, end - there, copied))
    del handle
    folder.cleanup()
    return ways


PARTS = {
    "core": measure_core,
    "replay": measure_replay,
    "clients": measure_clients,
    "ray": measure_ray,
    "nodes": measure_nodes,
}


def main(argv: list[str] | None = None) -> int:
    """Print what was asked for as JSON, with the machine and its load in the last minute."""
    from megarl.machine import machine_info

    parser = argparse.ArgumentParser(prog="python -m megarl.benchmarks.store", description="The store between teams.")
    parser.add_argument("--only", choices=list(PARTS), nargs="+", help="some of them")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {"machine": machine_info()}
    for name, measure in PARTS.items():
        if arguments.only is None or name in arguments.only:
            result[name] = {**measure(), "load": os.getloadavg()[0]}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
