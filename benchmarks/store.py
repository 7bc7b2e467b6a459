"""The store between teams: `python -m megarl.benchmarks.store`.

`core`: its state in one process, driven by 512 workers that draw and 512 that score. A step of 1,024 groups of 8
samples goes there, and what they make of it comes back. CPU-seconds per step, of the core with its journal and of what
drives it, what is held after many steps, and the CPU-seconds of a minute in which all of them wait.

`replay`: seconds in which a store that died reads a million of these events from its journal. That of a run is shorter,
because a snapshot of the state takes the place of the calls.

`clients`: the same steps between 16 processes, 8 of each team. CPU-seconds of the store's process per step.

`ray`: a giver and a taker, each a process of its own. Seconds from the first byte given to the last byte read, of bytes
and of a batch of 512 groups of 16 samples, beside copying as many bytes from one gigabyte of memory to another one
through shared memory, in the same run, by one thread. All of that memory has been written to before: a worker uses that
of a step for the next one (`megarl.data.room`). In a first step it is new: `new`, of a batch and of the copy, is into
memory that the reader gets from the kernel. The seconds are those of the fastest batch: `give` until the store has it,
`fetch` until the reader sees it in shared memory, `read` until it is a batch.

`nodes`: the same between two Ray nodes on this machine, each with an object store of its own, beside one loopback
connection between two processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.model import ParallelConfig
from megarl.dag.placement import Handover, Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.store.core import Core, GroupInfo
from megarl.store.durable import ROOM, DurableCore
from megarl.store.standing import Ping, Roll

WORKERS, GROUPS, SAMPLES, STEPS = 512, 1024, 8, 5
CHUNKS, CHUNK_BYTES = 32, 32 << 20
BATCH_GROUPS, BATCH_SAMPLES, TOKENS = 512, 16, 5_000
ROUNDS = 8
EVENTS = 1_000_000
CLIENTS, GROUP_BYTES = 8, 1 << 10
FIELDS = tuple(f"field_{i}" for i in range(9))


def teams(workers: int) -> Placement:
    """A team that draws and one that scores, of so many workers each."""
    return Placement(
        (
            TeamPlan("train", (Role.ACTOR,), workers, 0, ParallelConfig(), ("rollout", "train")),
            TeamPlan("score", (Role.REFERENCE,), workers, workers, ParallelConfig(), ("ref_logp",)),
        ),
        (
            Handover("rollout", "train", FIELDS, ("score",), "rollout"),
            Handover("ref_logp", "score", ("ref_logp",), ("train",), "rollout"),
        ),
    )


class Workers:
    """All workers of a run, calling as their clients do a store in this process.

    Args:
        path: of the journal.
        share: how groups are shared.
        room: of the journal.
    """

    def __init__(self, path: Path, share: str = "dealt", room: int = ROOM) -> None:
        self.store = DurableCore(lambda: Core(teams(WORKERS), GROUPS, share), path, "bench", room)  # type: ignore[arg-type]
        self.serials: Counter[tuple[str, int]] = Counter()
        self.fetches = 0

    def change(self, team: str, rank: int, method: str, *arguments: Any, refs: Sequence[Any] = ()) -> None:
        """A call that changes something, and the word that comes back."""
        self.serials[team, rank] += 1
        call = json.dumps([method, *arguments], separators=(",", ":"))
        self.store.change(team, rank, self.serials[team, rank], call, refs)
        self.store.word(team, rank)

    def drive(self, step: int, groups: list[GroupInfo]) -> None:
        """All calls of all workers in one step."""
        there, back = "rollout>score", "ref_logp>train"
        held = [groups[worker::WORKERS] for worker in range(WORKERS)]
        for worker, mine in enumerate(held):
            self.change("train", worker, "give", "train", worker, step, there, mine, refs=[object() for _ in mine])
        for worker in range(WORKERS):
            share = self.store.ask("assignment", "score", step, "rollout", worker)
            assert share is not None, "all have given"
            self.store.fetch("score", step, there, [group.uid for group in share])
            self.fetches += 1
            self.change("score", worker, "give", "score", worker, step, back, share, refs=[object() for _ in share])
            self.change("score", worker, "done", "score", worker, step)
        for worker, mine in enumerate(held):
            self.store.fetch("train", step, back, [group.uid for group in mine])
            self.fetches += 1
            self.change("train", worker, "done", "train", worker, step)


def groups_of_step() -> list[GroupInfo]:
    """Groups of unequal length."""
    return [
        GroupInfo(f"prompt-{k}", k, tuple(f"prompt-{k}#{i}" for i in range(SAMPLES)), 1000 + 37 * k % 900)
        for k in range(GROUPS)
    ]


def measure_core() -> dict[str, float]:
    """CPU-seconds of a step, by how groups are shared, and objects that the core holds after many."""
    import tracemalloc

    groups = groups_of_step()
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for share in ("dealt", "tokens"):
            workers = Workers(Path(folder) / share, share)
            workers.drive(0, groups)
            start = time.process_time()
            for step in range(1, STEPS + 1):
                workers.drive(step, groups)
            result[f"{share}_cpu_s_per_step"] = (time.process_time() - start) / STEPS
        result["minute_of_waiting_cpu_s"] = wait_a_minute()
        gc.collect()
        tracemalloc.start()
        for step in range(STEPS + 1, 3 * STEPS + 1):
            workers.drive(step, groups)
        gc.collect()
        result["kb_held_after_10_more_steps"] = tracemalloc.get_traced_memory()[0] / 1e3
        tracemalloc.stop()
    return result


def measure_replay() -> dict[str, float]:
    """Seconds of opening a store again whose journal holds so many calls, and the size of one that may be replaced."""
    groups, step = groups_of_step(), 0
    with tempfile.TemporaryDirectory() as folder:
        all_of_it = Path(folder) / "all"
        workers = Workers(all_of_it, room=1 << 40)
        while workers.serials.total() + workers.fetches < EVENTS:
            workers.drive(step, groups)
            step += 1
        del workers
        gc.collect()
        start = time.perf_counter()
        again = Workers(all_of_it, room=1 << 40)
        seconds = time.perf_counter() - start
        assert again.store.word("train", 0).heard == 2 * step, "nothing is missing"
        size = all_of_it.stat().st_size
        all_of_it.unlink()
        short, largest = Workers(Path(folder) / "short"), 0
        for step in range(100):
            short.drive(step, groups)
            largest = max(largest, (Path(folder) / "short").stat().st_size)
    return {"replay_s": seconds, "journal_mb": size / 1e6, "largest_mb_with_snapshots": largest / 1e6}


def wait_a_minute() -> float:
    """CPU-seconds of a minute in which all workers tell where they are, and ask in every slice where the others are."""
    start = time.process_time()
    roll = Roll(["train", "score"], 0.0)
    for now in range(0, 60, 5):
        for team in ("train", "score"):
            for worker in range(WORKERS):
                roll.ping(team, worker, Ping(now, "step/take", 1, "the groups of 'rollout' in step 1"), now)
                roll.others(team, now)
    return time.process_time() - start


def make_batch() -> Any:
    """About a gigabyte, as a rollout makes it: log-normal lengths around 5,000 tokens, of which 500 are the prompt."""
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

        from megarl.data.wire import Block
        from megarl.store.client import StoreClient

        torch.set_num_threads(1)
        self._client = StoreClient.connect("bench", team, 0, 60.0)
        self._target = np.zeros((CHUNKS, CHUNK_BYTES), np.uint8)
        self._batch: Any = make_batch() if team == "train" else None
        chunks = range(CHUNKS if team == "train" else 0)
        self._bytes = [Block((np.full(CHUNK_BYTES, k, np.uint8),)) for k in chunks]

    def give(self, step: int, batch: bool) -> tuple[float, float, int]:
        """Hand over a step; returns when it began and ended, and its bytes."""
        size = BATCH_SAMPLES if batch else 1
        groups = [
            GroupInfo(f"g{k}", k, tuple(f"g{k}#{i}" for i in range(size)), 1)
            for k in range(BATCH_GROUPS if batch else CHUNKS)
        ]
        places = [range(k * size, (k + 1) * size) for k in range(len(groups))]
        start = time.time()
        payloads = self._batch.to_blocks(places) if batch else self._bytes
        given = self._client.give(step, "rollout>score", groups, payloads, [0] * len(groups))
        end = time.time()
        self._client.done(step)
        return start, end, given

    def take(self, step: int, batch: bool, new: bool) -> tuple[float, float, int]:
        """Read it, every byte, into `new` memory; returns when it was there and when it was done, and the bytes."""
        import numpy as np

        from megarl.data.batch import Batch
        from megarl.data.room import rooms

        if new:
            rooms.give_back()
        mine = self._client.assignment(step, "rollout", 0)
        payloads = self._client.fetch(step, "rollout>score", [group.uid for group in mine])
        there = time.time()
        if batch:
            Batch.from_blocks(payloads)
        else:
            for target, payload in zip(self._target, payloads, strict=True):
                np.copyto(target, payload.parts[0])
        end = time.time()
        self._client.done(step)
        return there, end, sum(map(len, payloads))


class Member:
    """One of several workers of a team; a Ray actor."""

    def __init__(self, team: str, rank: int) -> None:
        import numpy as np

        from megarl.data.wire import Block
        from megarl.store.client import StoreClient

        self._client = StoreClient.connect("clients", team, rank, 120.0)
        self._bytes = Block((np.zeros(GROUP_BYTES, np.uint8),))

    def draw(self, step: int, groups: list[GroupInfo]) -> None:
        """Hand over a step, and read what comes back."""
        self._client.give(step, "rollout>score", groups, [self._bytes] * len(groups))
        self._client.fetch(step, "ref_logp>train", [group.uid for group in groups])
        self._client.done(step)

    def score(self, step: int, part: int) -> None:
        """Read a share of a step, and hand over what is made of it."""
        mine = self._client.assignment(step, "rollout", part)
        self._client.fetch(step, "rollout>score", [group.uid for group in mine])
        self._client.give(step, "ref_logp>train", mine, [self._bytes] * len(mine))
        self._client.done(step)


def measure_clients() -> dict[str, float]:
    """CPU-seconds of the store's process in a step of several processes, and seconds of the step."""
    import psutil
    import ray

    from megarl.store.actor import start_store

    groups = groups_of_step()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=1 << 28, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        handle = start_store("clients", teams(CLIENTS), GROUPS, "dealt", Path(folder) / "journal")
        make = ray.remote(Member).options(num_cpus=0)
        drawers, scorers = ([make.remote(team, rank) for rank in range(CLIENTS)] for team in ("train", "score"))

        def step(number: int) -> None:
            draws = [one.draw.remote(number, groups[rank::CLIENTS]) for rank, one in enumerate(drawers)]
            ray.get([*draws, *(one.score.remote(number, part) for part, one in enumerate(scorers))])

        step(0)
        below = psutil.Process().children(recursive=True)
        (process,) = [one for one in below if one.name().startswith("ray::StoreActor")]
        before, start = process.cpu_times(), time.perf_counter()
        for number in range(1, STEPS + 1):
            step(number)
        after, seconds = process.cpu_times(), time.perf_counter() - start
        memory = process.memory_info().rss
        ray.kill(handle)
    ray.shutdown()
    used = after.user + after.system - before.user - before.system
    return {"cpu_s_per_step": used / STEPS, "s_per_step": seconds / STEPS, "rss_mb": memory / 1e6}


class Copy:
    """From memory into shared memory that is mapped, and out of it into other memory."""

    def __init__(self, size: int) -> None:
        from multiprocessing.shared_memory import SharedMemory

        import numpy as np

        self._source, self._target = np.full(size, 1, np.uint8), np.zeros(size, np.uint8)
        self._memory = SharedMemory(create=True, size=size)
        assert self._memory.buf is not None, "it is open"
        self._view: Any = np.frombuffer(self._memory.buf, np.uint8)[:size]
        self._view[:] = 0

    def seconds(self, new: bool = False) -> float:
        """Of both; the second into `new` memory."""
        import numpy as np

        from megarl.data.room import Rooms

        start = time.perf_counter()
        np.copyto(self._view, self._source)
        np.copyto(Rooms().take(len(self._source)) if new else self._target, self._view)
        return time.perf_counter() - start

    def close(self) -> None:
        """Give the memory back."""
        self._view = None
        self._memory.close()
        self._memory.unlink()


class Way(NamedTuple):
    """Bytes that went from a giver to a taker: seconds of all, of its parts, and of copying as many."""

    size: int
    seconds: float
    give_s: float
    fetch_s: float
    read_s: float
    copy_s: float


def shares(ways: dict[str, list[Way]]) -> dict[str, float]:
    """What the fastest of each kind took beside the fastest copy of the same; the first of each map the memory."""
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
    """Seconds of the way of bytes, of a batch, and of copying as much; the least of some rounds, taken in turn."""
    import ray

    size = CHUNKS * CHUNK_BYTES
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=3 * size, log_to_driver=False)
    copy = Copy(size)
    ways = drive(copy.seconds)
    copy.close()
    ray.shutdown()
    return {"gb": ways["batch"][0].size / 1e9, **shares(ways)}


def measure_nodes() -> dict[str, float]:
    """The same from one Ray node to another one, and of a connection."""
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
    """Every way some times, in turn.

    Args:
        copy_s: seconds of copying all chunks, into new memory or not.
        apart: the giver's and the taker's nodes have resources of their names.
    """
    import ray

    from megarl.store.actor import start_store

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
    from megarl.tracking.machine import machine_info

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
