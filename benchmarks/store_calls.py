"""Calls of the store between teams, without bytes: `python -m megarl.benchmarks.store --only core replay clients`.

The measurements are described there.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megarl.benchmarks.store_pace import calls_of_minute, make, prompts_at_first
from megarl.config.model import ParallelConfig
from megarl.dag.placement import Handover, Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.disaggregated.buffer.core import Core, GroupInfo
from megarl.disaggregated.buffer.flow import Finished
from megarl.disaggregated.buffer.journal import ROOM, DurableCore
from megarl.disaggregated.buffer.progress import Ping, ProgressTable
from megarl.staleness import StalenessSettings

WORKERS, GROUPS, SAMPLES, STEPS = 512, 1024, 8, 5
EVENTS = 1_000_000
CLIENTS, GROUP_BYTES = 8, 1 << 10
PLACES = 32  # groups that a replica draws at a time, if it may hold so many
LOOKS, LOOKS_PER_MINUTE = 200, 600
FIELDS = tuple(f"field_{i}" for i in range(9))


def teams(workers: int) -> Placement:
    """Return a team that generates and one that scores, of so many workers each."""
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


def ready_teams(workers: int) -> Placement:
    """Return a team that generates and one that trains on what is ready, of so many workers each."""
    return Placement(
        (
            TeamPlan("train", (Role.ACTOR,), workers, 0, ParallelConfig(), ("train",)),
            TeamPlan("draw", (Role.ROLLOUT,), workers, workers, ParallelConfig(), ("rollout",)),
        ),
        (Handover("rollout", "draw", FIELDS, ("train",), "rollout"),),
    )


def flow_settings() -> StalenessSettings:
    """Return the settings of a run that does not end while it is measured, and in which nobody waits for newer
    weights."""
    return StalenessSettings("as_ready", 3, GROUPS, 1_000_000)


def places_of(replicas: int) -> tuple[int, int]:
    """Return, for each of so many replicas, places, and groups that it may hold."""
    fair = max(1, 2 * GROUPS // replicas)
    return min(PLACES, fair), fair


class Callers:
    """The workers that call a store in this process as their clients do; `store` is to be set."""

    store: DurableCore

    def __init__(self) -> None:
        self.serials: Counter[tuple[str, int]] = Counter()

    def change(self, team: str, rank: int, method: str, *arguments: Any, refs: Sequence[Any] = ()) -> Any:
        """Make a call that changes something, and the one that acknowledges it; return its answer."""
        self.serials[team, rank] += 1
        call = json.dumps([method, *arguments], separators=(",", ":"))
        answer, _ = self.store.change(team, rank, self.serials[team, rank], call, refs)
        self.store.word(team, rank)
        return answer


class ReadyWorkers(Callers):
    """All workers of a run whose samples come as they get ready.

    Args:
        path: path of the journal.
        count: workers of each team.
    """

    def __init__(self, path: Path, count: int) -> None:
        super().__init__()
        self._count = count
        self.store = DurableCore(lambda: Core(ready_teams(count), GROUPS, "dealt", flow_settings()), path, "bench")
        self.change("draw", 0, "open_flow", 0, 0, [], [])
        drawing = min(count, GROUPS)  # the others have nothing to do
        self._drawn = [self._swap(rank, 0, [], prompts_at_first(*places_of(count))) for rank in range(drawing)]
        self._calls = [
            calls_of_minute(len(range(rank, GROUPS, count)), *places_of(count), rank) for rank in range(count)
        ]

    def _swap(self, rank: int, version: int, finished: list[Finished], most: int) -> list[int]:
        key, refs = ready_teams(1).handovers[0].key, [object() for _ in finished]
        numbers: list[int] = self.change(
            "draw", rank, "swap", "draw", rank, finished, [key], [], version, most, refs=refs
        )
        return numbers

    def drive(self, step: int, groups: list[GroupInfo]) -> None:
        """Make all calls of all workers in one step; the groups of the next one are put before it is over."""
        key = ready_teams(1).handovers[0].key
        for step_drawn in (1, 2) if step == 1 else (step + 1,):
            named = [group._replace(uid=f"{step_drawn}/{group.uid}") for group in groups]
            for rank in range(len(self._drawn)):
                swap = partial(self._swap, rank, step - 1)
                make(self._calls[rank], self._drawn[rank], named[rank :: self._count], swap)
        for rank in range(self._count):
            share = self.store.ask("assignment", "train", step, "rollout", rank)
            assert share is not None, "all have been put"
            self.store.fetch("train", step, key, [group.uid for group in share])
            self.change("train", rank, "done", "train", rank, step)


class Workers(Callers):
    """All workers of a run whose samples come step by step.

    Args:
        path: path of the journal.
        share: way of sharing groups.
        room: room of the journal.
    """

    def __init__(self, path: Path, share: str = "dealt", room: int = ROOM) -> None:
        super().__init__()
        self.store = DurableCore(lambda: Core(teams(WORKERS), GROUPS, share), path, "bench", room)  # type: ignore[arg-type]
        self.fetches = 0

    def drive(self, step: int, groups: list[GroupInfo]) -> None:
        """Make all calls of all workers in one step."""
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
    """Return the groups of unequal length."""
    return [
        GroupInfo(f"prompt-{k}", k, tuple(f"prompt-{k}#{i}" for i in range(SAMPLES)), 1000 + 37 * k % 900)
        for k in range(GROUPS)
    ]


def measure_core() -> dict[str, float]:
    """Return the CPU-seconds of a step, by how groups are shared, and objects that the core holds after many."""
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
        for name, count in (("ready", WORKERS), (f"ready_by_{CLIENTS}", CLIENTS)):
            drawing = ReadyWorkers(Path(folder) / name, count)
            drawing.drive(1, groups)
            start = time.process_time()
            for step in range(2, STEPS + 2):
                drawing.drive(step, groups)
            result[f"{name}_cpu_s_per_step"] = (time.process_time() - start) / STEPS
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
    """Return seconds of opening a store again whose journal holds so many calls, and the size of one that may be
    replaced."""
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
    """Return the CPU-seconds of a minute in which all workers tell where they are, and ask in every slice where the
    others are."""
    start = time.process_time()
    roll = ProgressTable(["train", "score"], 0.0)
    for now in range(0, 60, 5):
        for team in ("train", "score"):
            for worker in range(WORKERS):
                roll.ping(team, worker, Ping(now, "step/take", 1, "the groups of 'rollout' in step 1"), now)
                roll.others(team, now)
    return time.process_time() - start


class Member:
    """One of several workers of a team; a Ray actor."""

    def __init__(self, team: str, rank: int) -> None:
        import numpy as np

        from megarl.data.wire import Block, Span
        from megarl.disaggregated.buffer.client import StoreClient

        self._client, self._rank = StoreClient.connect("clients", team, rank, 120.0), rank
        self._drawn: list[int] = []
        content = np.zeros(GROUP_BYTES, np.uint8)
        self._payloads = [Span(Block((content,)), 0, 1) for _ in range(GROUPS)]  # a block for each group

    def draw(self, step: int, groups: list[GroupInfo]) -> None:
        """Hand over a step, and read what comes back."""
        self._client.give(step, "rollout>score", groups, self._payloads[: len(groups)])
        self._client.fetch(step, "ref_logp>train", [group.uid for group in groups])
        self._client.done(step)

    def score(self, step: int, part: int) -> None:
        """Read a share of a step, and hand over what is made of it."""
        mine = self._client.assignment(step, "rollout", part)
        self._client.fetch(step, "rollout>score", [group.uid for group in mine])
        self._client.give(step, "ref_logp>train", mine, self._payloads[: len(mine)])
        self._client.done(step)

    def draw_ready(self, step: int, groups: list[GroupInfo]) -> None:
        """Make all calls of a minute, one after the other."""

        def swap(finished: list[Finished], most: int) -> list[int]:
            return self._client.swap(finished, {"rollout>train": self._payloads[: len(finished)]}, [], step - 1, most)[
                0
            ]

        if not self._drawn:
            self._drawn = swap([], prompts_at_first(*places_of(CLIENTS)))
        named = [group._replace(uid=f"{step}/{group.uid}") for group in groups]
        make(calls_of_minute(len(groups), *places_of(CLIENTS), self._rank), self._drawn, named, swap)

    def train_ready(self, step: int, part: int) -> None:
        """Read a share of what is ready."""
        mine = self._client.assignment(step, "rollout", part)
        self._client.fetch(step, "rollout>train", [group.uid for group in mine])
        self._client.done(step)

    def open_flow(self) -> None:
        """Let prompts begin."""
        self._client.open_flow(0, 0, {}, [])

    def look(self, times: int) -> None:
        """Look as a replica does while it generates."""
        for _ in range(times):
            self._client.has_come("wanted/1")
            time.sleep(60 / LOOKS_PER_MINUTE)


def measure_clients() -> dict[str, float]:
    """Return the CPU-seconds of the store's process in a step of several processes, and seconds of the step."""
    import psutil
    import ray

    from megarl.disaggregated.buffer.actor import start_store

    groups = groups_of_step()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=1 << 28, log_to_driver=False)
    make, result = ray.remote(Member).options(num_cpus=0), dict[str, float]()
    for ready in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            placed, flow = (ready_teams(CLIENTS), flow_settings()) if ready else (teams(CLIENTS), None)
            handle = start_store("clients", placed, GROUPS, "dealt", Path(folder) / "journal", flow=flow)
            names = ("draw", "train") if ready else ("train", "score")
            drawers, takers = ([make.remote(team, rank) for rank in range(CLIENTS)] for team in names)
            if ready:
                ray.get(drawers[0].open_flow.remote())
            first = 1 if ready else 0
            _step_of(drawers, takers, first, groups, ready=ready)
            below = psutil.Process().children(recursive=True)
            (process,) = [one for one in below if one.name().startswith("ray::StoreActor")]
            name, start = "ready_" if ready else "", time.perf_counter()
            before = _cpu_s(process)
            for number in range(first + 1, first + STEPS + 1):
                _step_of(drawers, takers, number, groups, ready=ready)
            result[f"{name}cpu_s_per_step"] = (_cpu_s(process) - before) / STEPS
            result[f"{name}s_per_step"] = (time.perf_counter() - start) / STEPS
            result[f"{name}rss_mb"] = process.memory_info().rss / 1e6
            if ready:
                minutes = [calls_of_minute(GROUPS // CLIENTS, *places_of(CLIENTS), rank) for rank in range(CLIENTS)]
                result["ready_calls_per_step"] = sum(map(len, minutes))
                before = _cpu_s(process)
                ray.get([one.look.remote(LOOKS) for one in drawers])
                result["minute_of_looks_cpu_s"] = (_cpu_s(process) - before) / LOOKS * LOOKS_PER_MINUTE
            for one in (*drawers, *takers, handle):
                ray.kill(one)
            process.wait(30)
    ray.shutdown()
    return result


def _step_of(drawers: Sequence[Any], takers: Sequence[Any], step: int, groups: list[GroupInfo], *, ready: bool) -> None:
    import ray

    draws = [one.draw_ready if ready else one.draw for one in drawers]
    takes = [one.train_ready if ready else one.score for one in takers]
    drawn = [draw.remote(step, groups[rank::CLIENTS]) for rank, draw in enumerate(draws)]
    ray.get([*drawn, *(take.remote(step, part) for part, take in enumerate(takes))])


def _cpu_s(process: Any) -> float:
    """Return the CPU-seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)
