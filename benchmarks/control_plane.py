"""Costs of a run's own bookkeeping at 1,024 ranks: `python -m megarl.benchmarks.control_plane`.

Each part runs with the code of a real run, and with as many files, keys, names or ranks as 1,024 ranks make. What only
a network or a parallel file system could show is added as an assumption, printed with the table: the time of one
message between two processes, and of opening a small file. A row is the time of one training step that the part takes
of the process that does it: of every rank, of the launcher, of the buffer's process, or of the store's thread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from megarl.models.weight_table import Coordinate
    from megarl.system.store import SharedStore

MESSAGE_S = 50e-6  # one message between two processes of a cluster
OPEN_S = 300e-6  # opening and reading a small file of a shared file system
_NAMES = 150  # metrics of a step
_REDUCTIONS = 6  # of a step: mini-batches, validation, the world
_LOOKS_PER_S = 5.0  # looks of a replica for the next meeting
_REPORTS_PER_S = 0.2
_SAMPLES, _TOKENS = 100_000, 2000  # samples of a step, and tokens of each
_MESSAGES = 6  # of a step between teams
_CALL_S = 1e-3  # CPU time of the buffer for a call, assumed
_MODEL = "Qwen/Qwen3-235B-A22B"
_DISK_BYTES = 2e9  # bytes per second that a machine writes or reads
_LINK_BYTES = 40e9  # bytes per second of a broadcast inside a stage


@dataclass(frozen=True)
class Row:
    """The cost of one part: `seconds` in a step of the process that `who` names, or `once`."""

    part: str
    who: str
    seconds: float
    note: str = ""
    once: bool = False


@dataclass(frozen=True)
class Scale:
    """The size of the run: ranks, ranks of a machine and of a replica, and seconds of a step."""

    ranks: int = 1024
    machine: int = 8
    replica: int = 8
    step_s: float = 60.0

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.ranks // self.machine

    @property
    def replicas(self) -> int:
        """Number of replicas of the model that generate."""
        return self.ranks // self.replica


def cpu_s(call: Callable[[], Any], times: int = 5) -> float:
    """Return the CPU-seconds of one call in this thread, the least of several."""
    spent = []
    for _ in range(times):
        start = time.thread_time()
        call()
        spent.append(time.thread_time() - start)
    return min(spent)


# -- launcher ----------------------------------------------------------------------------------------------------------


def heartbeats(scale: Scale, folder: Path) -> Iterator[Row]:
    """Measure how a machine copies its heartbeats, and how a launcher watches all ranks and follows their output."""
    from megarl.launchers.output import Follower
    from megarl.runtime import machine_beats
    from megarl.runtime.health import Heartbeat, Watch

    run_dir, elsewhere = folder / "run", folder / "tmp"
    (run_dir / "logs").mkdir(parents=True)
    elsewhere.mkdir()
    with (
        mock.patch.dict(os.environ, {machine_beats.BY_MACHINE: "1"}),
        mock.patch.object(machine_beats.tempfile, "gettempdir", return_value=str(elsewhere)),
        mock.patch.object(machine_beats.Copier, "_keep_copying"),
        mock.patch.object(machine_beats, "_by_machine", False),
    ):
        beats = [Heartbeat(run_dir, rank) for rank in range(scale.machine)]
        copier = machine_beats.Copier(run_dir, 0)
        copying = cpu_s(copier.copy)
        for rank in range(scale.machine):  # of another machine from here on
            (machine_beats.local_folder(run_dir) / f"rank_{rank}").unlink()
    yield Row("heartbeats: copying a machine's", "a thread of one rank", (copying + OPEN_S) * scale.step_s)
    [path] = (run_dir / "heartbeats").glob("machine_*")
    states = list(json.loads(path.read_bytes()[8:]).values())
    for number in range(scale.machines):
        ranks = {scale.machine * number + i: state for i, state in enumerate(states)}
        data = json.dumps(ranks).encode()
        (run_dir / f"heartbeats/machine_{number}").write_bytes(b"%08x" % zlib.crc32(data) + data)
    path.unlink()
    with mock.patch.object(machine_beats.tempfile, "gettempdir", return_value=str(elsewhere)):
        machine_beats.watch_machines(run_dir)
        view, everyone = machine_beats.machines_of(run_dir), range(scale.ranks)
        assert view is not None
        watch = Watch(run_dir, everyone, math.inf, math.inf)

        def changed() -> None:
            view._read, view._records, watch._looked = 0.0, {}, 0.0
            watch.check(everyone)

        first, again = cpu_s(changed, 20), cpu_s(lambda: watch.check(everyone))
        log: Any = SimpleNamespace(write=lambda rank, data: None)
        with mock.patch.object(Follower, "_follow"):
            follower = Follower(run_dir / "logs", everyone, log, view.log_size)
        looking = cpu_s(follower._copy_new)
    second = (first + scale.machines * OPEN_S) / machine_beats.LOOK_S + 10 * again
    note = f"{scale.machines} files in {machine_beats.LOOK_S:g} s"
    yield Row("heartbeats: watching all ranks", "launcher", second * scale.step_s, note)
    yield Row("output: finding logs that have grown", "launcher", 10 * looking * scale.step_s)
    del beats


# -- the store ---------------------------------------------------------------------------------------------------------


def store_s(call: Callable[[], Any]) -> float:
    """Return the CPU-seconds of a store's thread, and of all other threads of this process but the calling one."""
    start = time.process_time() - time.thread_time()
    call()
    return time.process_time() - time.thread_time() - start


@contextmanager
def _store() -> Iterator[SharedStore]:
    from torch.distributed import TCPStore

    from megarl.system.store import SharedStore

    yield SharedStore(TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=60)), "rank 0", "60 s")


def store_calls(scale: Scale) -> Iterator[Row]:
    """Measure looks for meetings, the meeting at the end of generation, and how a team reports to the buffer."""
    from megarl.disaggregated.buffer.progress import Ping, ProgressTable
    from megarl.disaggregated.buffer.team_progress import TeamProgress

    with _store() as store:
        calls = 2000
        start = time.perf_counter()
        busy = store_s(lambda: [store.check(["meetings/0/0/called"]) for _ in range(calls)]) / calls
        wall = (time.perf_counter() - start) / calls
        looks = scale.replicas * _LOOKS_PER_S * scale.step_s
        yield Row("generation: looks for a meeting", "store's thread", looks * busy, f"{1e6 * busy:.0f} us a look")
        yield Row("generation: looks for a meeting", "a replica", (wall + MESSAGE_S) * _LOOKS_PER_S * scale.step_s)
        workers = [TeamProgress(store, rank, scale.ranks) for rank in range(scale.ranks)]
        ping = Ping(123456, "step/actor_train", 12, "")

        def report() -> None:
            for worker in workers:
                worker.write(ping)

        reporting = store_s(report)
        news = workers[0].news()
        reading = store_s(workers[0].news)
        store.set("mail/update/1", "{}")
        one = "mail/update/1"
        passing = store_s(lambda: [(store.has(one, 5), store.get(one)) for _ in range(scale.ranks)])
    yield Row("buffer: messages that all workers read", "store's thread", _MESSAGES * passing, f"{_MESSAGES} messages")
    yield Row("buffer: messages that all workers read", "buffer", _MESSAGES * _CALL_S, "one call per message and team")
    reports = _REPORTS_PER_S * scale.step_s
    yield Row("buffer: reports of progress", "store's thread", (reporting + reading) * reports)
    table = ProgressTable(["team"], 0.0)

    def record() -> None:
        for rank, ping in news.items():
            table.ping("team", rank, ping, 1.0)

    recording = cpu_s(record)
    yield Row("buffer: reports of progress", "buffer", (recording + _CALL_S) * reports, "one call per team and 5 s")


def end_of_generation(scale: Scale) -> Iterator[Row]:
    """Measure the one meeting of all ranks at the end of generation: a ring of small messages, and reading reports."""
    from dataclasses import asdict

    from megarl.rollout.sglang.turns import _Report

    one = json.dumps(asdict(_Report(False, False, False, False, None, [], False)))
    decoding = cpu_s(lambda: [_Report(**json.loads(one)) for _ in range(scale.ranks)])
    yield Row("generation: the meeting at its end", "every rank", decoding + 2 * (scale.ranks - 1) * MESSAGE_S)


def samples_of_replica(scale: Scale) -> Iterator[Row]:
    """Measure how the first rank of a replica reads the servers' answers, and passes the samples to its other ranks."""
    from pydantic_core import from_json

    from megarl.config.rollout import SamplingConfig
    from megarl.rollout.engine import Completion
    from megarl.rollout.sglang.samples import ServedSample
    from megarl.sync.protocol import version_tag

    random_, tag, sampling = random.Random(0), version_tag(1, "run"), SamplingConfig(max_new_tokens=_TOKENS)
    scored = [[-random_.expovariate(2.0), random_.randrange(150_000), None] for _ in range(_TOKENS)]
    meta = {"output_token_logprobs": scored, "weight_version": tag, "finish_reason": {"type": "length"}}
    answer = json.dumps({"output_ids": [number for _, number, _ in scored], "meta_info": meta}).encode()

    def read() -> Completion:
        sample = ServedSample(0, [1], 0)
        sample.add(from_json(answer, cache_strings="keys"), sampling, [], tag)
        return sample.completion()

    completion = read()
    text = json.dumps(completion.to_json())
    count = _SAMPLES / scale.replicas
    note = f"{count:.0f} of {_SAMPLES:,} samples of {_TOKENS:,} tokens"
    yield Row("generation: reading servers' answers", "a replica's first rank", count * cpu_s(read, 20), note)
    passing = cpu_s(lambda: json.dumps(completion.to_json()), 20)
    yield Row("generation: passing samples on", "a replica's first rank", count * passing)
    taking = cpu_s(lambda: Completion.from_json(json.loads(text)), 20)
    yield Row("generation: taking samples", "a replica's other ranks", count * taking)


# -- metrics -----------------------------------------------------------------------------------------------------------


def metrics(scale: Scale) -> Iterator[Row]:
    """Measure reductions of a step's metrics as rows of a table, and the exchange of names of the first one."""
    from megarl.system.metric_table import MetricTable
    from megarl.system.metrics import Metrics

    bag, table = Metrics(), MetricTable()
    for i in range(_NAMES):
        (bag.max(f"some/metric_{i}", i) if i % 3 else bag.mean(f"some/metric_{i}", i, 2))
    names = table.unknown(bag)
    text = json.dumps(names)

    def learn() -> None:
        for _ in range(scale.ranks):
            table.add(map(tuple, json.loads(text)))

    learning = cpu_s(learn)
    levels = math.ceil(math.log2(scale.ranks))
    row = table.row(bag)
    once = cpu_s(lambda: table.row(bag)) + levels * cpu_s(lambda: table.combine(row, row.clone()))
    once += cpu_s(lambda: table.metrics(table.row(bag))) + 2 * levels * MESSAGE_S
    yield Row("metrics: reductions", "every rank", once * _REDUCTIONS, f"{_REDUCTIONS} of {_NAMES} names")
    ring = 2 * (scale.ranks - 1) * MESSAGE_S
    yield Row("metrics: agreeing on names", "every rank", learning + ring, "when new names appear", once=True)


# -- weights and checkpoints -------------------------------------------------------------------------------------------


def _layout(tp: int, pp: int, ep: int, ranks: int) -> list[Coordinate]:
    """Return the coordinates by rank: tensor parallel fastest, then data, then pipeline."""
    from megarl.models.weight_table import Coordinate

    per_stage = ranks // pp
    return [Coordinate(tp, i % tp, pp, stage, 1, ep, i % ep, 1, 0) for stage in range(pp) for i in range(per_stage)]


def weights(scale: Scale) -> Iterator[Row]:
    """Plan the export of a model of published size, and the verification of servers, stage by stage."""
    import torch

    from megarl.artifacts import facts
    from megarl.config.model import ModelConfig
    from megarl.models.hf import load_hf_config
    from megarl.models.weight_table import WeightTable
    from megarl.models.weights.export import FilePlan
    from megarl.models.weights.files import _group

    known = json.loads((Path(facts.__file__).parent / "known_models.json").read_text(encoding="utf-8"))[_MODEL]
    table = WeightTable.of(load_hf_config(ModelConfig(hf_config=known)))
    shapes, pp = table.shapes(), 8
    bytes_ = {name: 2 * math.prod(shape) for name, shape in shapes.items()}
    groups = _group(shapes, dict.fromkeys(shapes, torch.bfloat16), int(4e9))
    files = {name: number for number, names in enumerate(groups) for name in names}
    layout = _layout(4, pp, 8, scale.ranks)
    start = time.process_time()
    plan = FilePlan.of(layout, table.shards, dict(zip(shapes, shapes, strict=True)), files)
    planning = time.process_time() - start
    written: dict[int, int] = {}
    for name, rank in plan.writers.items():
        machine = rank // scale.machine
        written[machine] = written.get(machine, 0) + bytes_[name]
    note = f"{sum(bytes_.values()) / 1e9:.0f} GB by {len(written)} machines, at the end of a run"
    yield Row("export", "every rank", planning + max(written.values()) / _DISK_BYTES, note, once=True)
    stage = [sum(bytes_.values()) / pp / _LINK_BYTES, len(shapes) / pp * 1e-3]
    yield Row("verification of servers", "every rank", max(stage), "when a server starts", once=True)


def planned(scale: Scale) -> list[Row]:
    """Return all rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows = list(heartbeats(scale, Path(folder)))
    return [
        *rows,
        *end_of_generation(scale),
        *samples_of_replica(scale),
        *store_calls(scale),
        *metrics(scale),
        *weights(scale),
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megarl.benchmarks.control_plane", description=__doc__)
    parser.add_argument("--ranks", type=int, default=Scale.ranks, help="a multiple of 64")
    parser.add_argument("--step", type=float, default=Scale.step_s, help="seconds of a training step")
    options = parser.parse_args(argv)
    scale = Scale(ranks=options.ranks, step_s=options.step)
    print(
        f"{scale.ranks} ranks on {scale.machines} machines, {scale.replicas} replicas, steps of {scale.step_s:g} s; a "
        f"message takes {1e6 * MESSAGE_S:.0f} us, opening a file {1e3 * OPEN_S:.1f} ms, a machine writes "
        f"{_DISK_BYTES / 1e9:.0f} GB/s\n"
    )
    print("| part | of | s | share of a step | |\n|---|---|---|---|---|")
    for row in planned(scale):
        share = "once" if row.once else f"{row.seconds / scale.step_s:.2%}"
        print(f"| {row.part} | {row.who} | {row.seconds:.3f} | {share} | {row.note} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
