"""`megarl bench sync`: 400 MB of bf16 weights to a receiver process by every transport, beside the machine's limits.

    megarl bench sync
    megarl bench sync --json sync.json
    megarl bench sync --link-gbit 1             # over a loopback interface of 1 Gbit/s, as between distant hosts

One process holds 200 random tensors of a million elements, as a trainer of one rank would; another takes updates the
way an SGLang server does and copies the tensors into its own. Seconds are wall seconds of a whole update from begin
to end, gathering included, the least of several after a first one that is not counted. Then four processes, as the
ranks of a trainer, update eight receivers with 100 MB from shard to shard. Limits, measured in the same run: copying
through shared memory, a loopback connection, a gloo broadcast, and comparing all words with a copy, below which no
delta can be found. Then the time to plan: 1,000 tensors, and a model like DeepSeek-V3 from EP64 x PP16 to 32 servers
of tp 8 x ep 8 (only names and shapes). Wall seconds mean something only while nothing else runs: the share that others
took is printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from megarl.models.layers.rules import TensorRegion
    from megarl.rollout.sglang.receiver import SglangReceiver
    from megarl.sync.plan import Held, SyncPlan
    from megarl.sync.sender import SyncReport
    from megarl.sync.shards.transfer import OwnShards
    from megarl.sync.transports.base import Transport

TENSORS, SIDE = 200, 1000  # 200 matrices of 1000 x 1000
BUCKET_MB = 100
DEADLINE_S = 120.0
CHANGED = 0.01  # share of the elements that differ between two versions
REPEATS = 10
_HOST = "127.0.0.1"
_RUN = "bench"  # part of the names of weight versions
_LINKED = "MEGARL_BENCH_LINK"  # set in the process that runs on the slow interface
_SLOW = 'ip link set lo up && tc qdisc add dev lo root tbf rate "$0"gbit burst 1mb latency 50ms && exec "$@"'


def _weights() -> dict[str, Tensor]:
    import torch

    g = torch.Generator().manual_seed(0)
    return {f"model.layers.{i}.weight": torch.randn(SIDE, SIDE, generator=g).to(torch.bfloat16) for i in range(TENSORS)}


def _held(names: list[str]) -> dict[str, Held]:
    from megarl.sync.plan import Held

    region = ((0, SIDE), (0, SIDE))
    return {name: Held((SIDE, SIDE), ((region, (0,)),)) for name in names}


def receiver_at(url: str, number: int = 0) -> SglangReceiver:
    """Return the trainer's end of a receiver process, as server `number`."""
    from transformers import LlamaConfig

    from megarl.rollout.sglang.api import ServerApi
    from megarl.rollout.sglang.fleet import Server
    from megarl.rollout.sglang.layout import ServerLayout
    from megarl.rollout.sglang.receiver import SglangReceiver

    server = Server(number, ServerApi(url, None, f"receiver {number}"), "current")
    return SglangReceiver(server, ServerLayout.of(LlamaConfig()))


@contextmanager
def receiver_process(folder: Path, number: int = 0) -> Iterator[tuple[SglangReceiver, subprocess.Popen[bytes]]]:
    """Start a receiver process, and end it after the block."""
    from megarl.system.compat.sglang import CPU_MALLOC

    port_file = folder / f"port-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "megarl.benchmarks.sync.receiver", str(port_file)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": CPU_MALLOC})
    try:
        end = time.monotonic() + DEADLINE_S
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the receiver did not start")
            time.sleep(0.05)
        yield receiver_at(f"http://127.0.0.1:{port_file.read_text()}", number), process
    finally:
        process.kill()
        process.wait()


@contextmanager
def _transport(name: str, plan: SyncPlan, folder: Path) -> Iterator[Transport]:
    import torch

    from megarl.sync.transports.delta import DeltaTransport, start_relay
    from megarl.sync.transports.disk import DiskTransport
    from megarl.sync.transports.distributed import DistributedTransport
    from megarl.sync.transports.tensor import TensorTransport

    cpu = torch.device("cpu")
    if name == "delta":
        process, port = start_relay(folder, "bench", DEADLINE_S)
        try:
            yield DeltaTransport(plan, {_HOST: (_HOST, port)}, "bench", "0", _RUN, DEADLINE_S)
        finally:
            process.kill()
            process.wait()
    elif name == "tensor":
        yield TensorTransport(plan, cpu, DEADLINE_S)
    elif name == "distributed":
        made = DistributedTransport(cpu, DEADLINE_S, "127.0.0.1")
        yield made
        made.close()
    else:
        from transformers import LlamaConfig

        yield DiskTransport(folder / "sync", 0, LlamaConfig(), DEADLINE_S)


class _Update:
    """One update after another of one receiver by one transport."""

    def __init__(
        self,
        send: Callable[[Sequence[SglangReceiver], SyncReport], None],
        transport: Transport,
        receiver: SglangReceiver,
    ) -> None:
        self.send, self.transport, self.receiver, self.version = send, transport, receiver, 0

    def __call__(self) -> None:
        from megarl.sync.protocol import ReceiverUpdate, version_tag
        from megarl.sync.receiver import UpdateStep
        from megarl.sync.sender import SyncReport

        self.receiver.server.version = self.version or None
        self.version += 1
        tag = version_tag(self.version, _RUN)
        step, report = UpdateStep(f"update to version {tag}", DEADLINE_S), SyncReport(self.version, "bench")
        update = ReceiverUpdate(self.receiver, tag, "abort", self.transport.session, step)
        update.open()
        self.transport.start(self.version, [self.receiver])
        self.send([self.receiver], report)
        if report.failed:
            raise RuntimeError(report.failed[0])
        self.transport.publish()
        update.load(self.transport.commit)
        update.reopen()


def _least(call: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    times = []
    for number in range((3 if _LINKED in os.environ else REPEATS) + 1):
        if before is not None:
            before()
        start = time.perf_counter()
        call()
        if number:
            times.append(time.perf_counter() - start)
    return min(times)


def _measure(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of one transport."""
    import torch

    from megarl.sync.plan import TrainerRank, make_plan
    from megarl.sync.sender import BucketSender
    from megarl.sync.source import Source
    from megarl.system.comm import WorkerGroup

    weights = _weights()
    plan = make_plan(_held(list(weights)), [TrainerRank()], [_HOST], bucket_bytes=BUCKET_MB * 10**6)
    region = ((0, SIDE), (0, SIDE))
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    rows = []
    with receiver_process(folder) as (receiver, _), _transport(name, plan, folder) as transport:
        regions: dict[tuple[str, TensorRegion], Tensor] = {(key, region): tensor for key, tensor in weights.items()}
        source = Source(regions, plan, WorkerGroup.alone(), torch.bfloat16, live=transport.live)
        sender = BucketSender(source, transport)
        update = _Update(lambda receivers, report: sender.run([0], receivers, report), transport, receiver)

        def row(what: str, seconds: float, sent: int) -> dict[str, Any]:
            buckets = (sender.buffer_bytes + source.peak_staged) / (BUCKET_MB * 1e6)
            return {"transport": what, "s": seconds, "gb_per_s": nbytes / seconds / 1e9, "mb": sent / 1e6,
                    "buckets": buckets}  # fmt: skip

        if name != "delta":
            rows.append(row(name, _least(update), nbytes))
            return rows
        from megarl.sync.transports.delta import DeltaTransport

        assert isinstance(transport, DeltaTransport)
        # without earlier versions to compare with, everything is sent
        everything = _least(update, transport._bases.clear)
        rows.append(row("delta, full", everything, transport.sent_bytes))
        step = iter(range(10**6))

        def change(part: float) -> Callable[[], None]:
            def some() -> None:
                g = torch.Generator().manual_seed(next(step))
                for tensor in weights.values():
                    at = torch.randint(0, SIDE * SIDE, (int(part * SIDE * SIDE),), generator=g)
                    tensor.view(-1)[at] += 1.0

            return some

        rows.append(row("delta, 1% of elements", _least(update, change(CHANGED)), transport.sent_bytes))

        def few() -> None:
            for tensor in list(weights.values())[: int(TENSORS * CHANGED)]:
                tensor.add_(1.0)

        rows.append(row("delta, 1% of tensors", _least(update, few), transport.sent_bytes))
    return rows


def own_shards(weights: dict[str, Tensor], machine: str, senders: int = 1) -> OwnShards:
    """Return what one of `senders` trainer ranks knows, to send matrices from shard to shard.

    Args:
        weights: this rank's rows of each matrix. Every rank holds equally many, in the order of ranks.
        machine: name of the machine of all trainer ranks.
        senders: number of trainer ranks.
    """
    import numpy as np

    from megarl.sync.shards.boxes import (
        BoxTable,
        GpuPlace,
        ParameterTable,
        RankStorage,
        TensorTable,
        padded_shape,
        row_major,
    )
    from megarl.sync.shards.transfer import OwnShards

    names, rows = np.array([*weights]), np.arange(len(weights))
    parts = [tuple(tensor.shape) for tensor in weights.values()]
    sizes = [(senders * part[0], *part[1:]) for part in parts]
    stored, whole = (np.array([padded_shape(shape) for shape in shapes]) for shapes in (parts, sizes))
    dtypes, storages = np.array(["bfloat16"] * len(weights)), []
    for number in range(senders):
        lo, hi = 0 * whole, whole.copy()
        lo[:, 0], hi[:, 0] = number * stored[:, 0], (number + 1) * stored[:, 0]
        boxes = BoxTable(rows, lo, hi, rows, 0 * rows, row_major(stored), 0 * rows)
        storages.append(RankStorage(ParameterTable(names, stored, dtypes), boxes))
    places = [GpuPlace(machine, number) for number in range(senders)]
    return OwnShards(weights, storages, places, TensorTable(names, whole, dtypes), sizes)


def _measure_shards(folder: Path, *, colocated: bool = False) -> dict[str, Any]:
    """Return the row of the transport from shard to shard, or with `colocated` as to a server on the sender's GPU."""
    from dataclasses import replace

    from megarl.sync.shards.machine import machine_name
    from megarl.sync.shards.transfer import ShardTransfer
    from megarl.sync.transports.shards import ShardsTransport, planner
    from megarl.system.comm import WorkerGroup

    weights = _weights()
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    with receiver_process(folder) as (receiver, _):
        alone, rounds = WorkerGroup.alone(), planner(BUCKET_MB * 10**6, colocated=colocated)
        # a server on the sender's GPU has to be on its machine
        own = own_shards(weights, machine_name() if colocated else _HOST)
        own = replace(own, gpus=[""]) if colocated else own
        transport = ShardsTransport(ShardTransfer(own, rounds, alone, _RUN, DEADLINE_S, _HOST))

        def send(receivers: Sequence[SglangReceiver], report: SyncReport) -> None:
            transport.transfer.run(receivers, {0}, report)

        seconds = _least(_Update(send, transport, receiver))
        buffers = transport.transfer.buffer_bytes / (BUCKET_MB * 1e6)
        transport.close()
    name = "shards, colocated" if colocated else "shards"
    return {"transport": name, "s": seconds, "gb_per_s": nbytes / seconds / 1e9, "mb": nbytes / 1e6,
            "buckets": buffers}  # fmt: skip


def _plan_seconds() -> dict[str, float]:
    from megarl.benchmarks.sync.deepseek import deepseek_v3
    from megarl.sync.plan import Held, TrainerRank, make_plan

    half = SIDE // 2
    regions = ((((0, half), (0, SIDE)), (0,)), (((half, SIDE), (0, SIDE)), (1,)))
    thousand = {f"model.layers.{i}.weight": Held((SIDE, SIDE), regions) for i in range(1000)}
    tensors, ranks = deepseek_v3(pp=16, ep=64)
    return {
        "plan, 1000 tensors": _least(lambda: make_plan(thousand, [TrainerRank()] * 2, [_HOST] * 4)),
        "plan, 671B": _least(lambda: make_plan(tensors, ranks, [_HOST] * 32)),
    }


def measure() -> dict[str, Any]:
    """Return all numbers."""
    import torch

    from megarl.benchmarks.sync import limits
    from megarl.benchmarks.sync.many import many_seconds

    torch.set_num_threads(1)
    data = torch.cat([tensor.flatten() for tensor in _weights().values()]).view(torch.uint8)
    bucket = BUCKET_MB * 10**6
    results: dict[str, Any] = {
        "limits": {
            "memcpy": limits.memory_seconds(data, bucket),
            "tcp": limits.tcp_seconds(data),
            "gloo": limits.gloo_seconds(data, bucket),
            "compare": limits.compare_seconds(data),
        },
        "bytes": len(data),
    }
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        names = ("tensor", "distributed", "disk", "delta")
        results["rows"] = [row for name in names for row in _measure(name, Path(folder))]
        results["rows"] += [_measure_shards(Path(folder), colocated=colocated) for colocated in (False, True)]
        results["many"] = many_seconds(Path(folder))
    results["plan"] = _plan_seconds()
    return results


def _judged_many(many: dict[str, float], link_gbit: float | None) -> dict[str, Any]:
    """Return the line of four trainer ranks and eight servers, with a target only for a limited link."""
    line = {"what": "shards, 4 ranks to 8 servers", "s": many["s"], "bytes": many["bytes"], "target": "", "met": None}
    if link_gbit:
        share = many["bytes"] * 8e-9 / link_gbit / many["s"]
        line |= {"target": f"{share:.0%} of {link_gbit:g} Gbit/s, at least 80%", "met": share >= 0.8}
    return line


def judged(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of the table: what, seconds, and the target with whether it is met."""
    by_name = {row["transport"]: row for row in found["rows"]}
    limits, lines = found["limits"], []
    for name, seconds in limits.items():
        lines.append({"what": f"limit: {name}", "s": seconds, "target": "", "met": None})
    against = {"tensor": ("memcpy", 0.6), "distributed": ("gloo", 0.7), "shards": ("gloo", 0.8)}
    against["shards, colocated"] = against["tensor"]
    for name, row in by_name.items():
        line = {"what": name, "s": row["s"], "mb": row["mb"], "buckets": row["buckets"], "target": "", "met": None}
        if name in against:
            limit, part = against[name]
            ratio = limits[limit] / row["s"]
            line |= {"target": f"{ratio:.0%} of {limit}, at least {part:.0%}", "met": ratio >= part}
        elif "1%" in name:
            ratio = row["s"] / by_name["delta, full"]["s"]
            line |= {"target": f"{ratio:.0%} of the full time, at most 10%", "met": ratio <= 0.1}
        lines.append(line)
    lines.append(_judged_many(found["many"], found.get("link_gbit")))
    for (name, seconds), limit_s in zip(found["plan"].items(), (0.2, 5.0), strict=True):
        lines.append({"what": name, "s": seconds, "target": f"{limit_s:g} s", "met": seconds <= limit_s})
    return lines


def table(found: dict[str, Any]) -> Table:
    """Return one line per measurement."""
    from rich.table import Table

    title = f"{found['bytes'] / 1e6:.0f} MB of bf16 to another process, wall seconds"
    made = Table(title=title, title_justify="left")
    for column in ("", "s", "GB/s", "MB sent", "memory in buckets", "target", "met"):
        made.add_column(column, justify="left" if column in ("", "target", "met") else "right")
    for line in judged(found):
        rate = "" if "plan" in line["what"] else f"{line.get('bytes', found['bytes']) / line['s'] / 1e9:.2f}"
        sizes = (f"{line['mb']:.0f}", f"{line['buckets']:.2f}") if "mb" in line else ("", "")
        verdict = {True: "yes", False: "no", None: ""}[line["met"]]
        made.add_row(line["what"], f"{line['s']:.3f}", rate, *sizes, line["target"], verdict)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl bench` for this benchmark."""
    parser.add_argument("--link-gbit", type=float, metavar="G", help="sync: limit the loopback interface to G Gbit/s")


def _on_link(arguments: argparse.Namespace) -> int:
    """Run the benchmark again, in a network namespace of its own whose loopback interface is slow."""
    from megarl.system.errors import UserError

    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing or sys.platform != "linux":
        raise UserError(
            f"a slow link needs Linux and {', '.join(missing) or 'its tools'}",
            where="--link-gbit",
            found=f"{arguments.link_gbit:g}",
            fix="install util-linux and iproute2, or measure without it",
        )
    again = [sys.executable, "-m", "megarl", "bench", "sync", "--link-gbit", str(arguments.link_gbit)]
    if arguments.json is not None:
        again += ["--json", str(arguments.json)]
    command = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else []), "sh", "-c", _SLOW]
    return subprocess.call([*command, f"{arguments.link_gbit:g}", *again], env=os.environ | {_LINKED: "1"})


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and save; returns the exit code."""
    if arguments.link_gbit and _LINKED not in os.environ:
        return _on_link(arguments)
    from megarl.benchmarks.program import OthersShare
    from megarl.benchmarks.report import show_and_save

    with OthersShare() as others:
        results = measure() | {"link_gbit": arguments.link_gbit}
    link = f"-{arguments.link_gbit:g}gbit" if arguments.link_gbit else ""
    show_and_save(f"sync{link}", table(results), results, others.share, arguments.json)
    return 0
