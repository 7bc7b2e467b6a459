"""`megarl bench checkpoint`: bytes, seconds and memory of writing and reading a checkpoint.

    megarl bench checkpoint
    megarl bench checkpoint --json checkpoint.json

A Qwen3 of 241M parameters in bf16 with AdamW, 14 bytes per parameter on disk, by 1, 2 and 4 data-parallel processes of
one thread. `blocked` is how long training stands still (the copy to host memory), `writing` how long the threads then
take until the checkpoint is complete, flushed to disk; `verifying` reads all files and compares checksums, with none of
them in the page cache; `loading` reads them again, from the page cache. Memory is what a rank allocates beyond what it
had (mapped files are not counted: the kernel takes their pages back). Figures are the least of two rounds, of the
slowest or largest rank; `_cpu_s` are CPU-seconds of one rank, which are more robust on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.system.comm import WorkerGroup
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout

RANKS = (1, 2, 4)
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 20000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
ROUNDS = 2
_STEP = 1


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and save; returns the exit code."""
    from rich.table import Table

    from megarl.benchmarks.program import run_program
    from megarl.benchmarks.report import show_and_save

    rows, shares = [], []
    for ranks in RANKS:
        text, others = run_program([sys.executable, "-m", __spec__.name, str(ranks)])
        rows.append(json.loads(text))
        shares.append(others)
    columns = [name for name in rows[0] if name != "parameters"]
    table = Table(
        *(name.replace("_", "\n") for name in columns), title=f"a checkpoint of {rows[0]['parameters']:,} parameters"
    )
    for row in rows:
        table.add_row(*(f"{row[name]:.3g}" for name in columns))
    show_and_save("checkpoint", table, {"results": rows}, max(shares), arguments.json)
    return 0


def measure() -> dict[str, Any]:
    """Return each number's minimum over several rounds, of the slowest or largest rank."""
    import torch
    import torch.distributed as dist

    from megarl.config.model import ParallelConfig
    from megarl.system.comm import team_world
    from megarl.training.parallel import init_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = _engine(init_parallel(ParallelConfig(), team_world(600.0)))
    rounds = [_round(engine) for _ in range(ROUNDS)]
    least = {name: min(each[name] for each in rounds) for name in rounds[0]}
    rows = engine.layout.world.all_gather_json(least)
    largest = {name: max(each[name] for each in rows) for name in least}
    parameters = sum(parameter.numel() for chunk in engine.chunks for parameter in chunk.parameters())
    return {"ranks": len(rows), "parameters": parameters, **largest}


def _round(engine: MegatronEngine) -> dict[str, Any]:
    """Write, drop from the page cache, and read."""
    from megarl.training import checkpoint

    row: dict[str, Any] = {}
    world = engine.layout.world
    with tempfile.TemporaryDirectory(dir=os.environ["FOLDER"]) as made:
        root = Path(world.all_gather_json(made)[0])
        with _peak_memory(row, "memory_save_gb"):
            with _seconds(row, world, "blocked"):
                saving = checkpoint.begin(root, _STEP, {"actor": engine}, {})
            with _seconds(row, world, "writing"):
                saving.wait()
        folder = root / f"step_{_STEP}"
        files = sorted(folder.iterdir())
        row["gb_per_rank"] = (folder / f"rank_{world.rank}.safetensors").stat().st_size / 1e9
        row["gb"] = sum(path.stat().st_size for path in files) / 1e9
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with _peak_memory(row, "memory_load_gb"):
            with _seconds(row, world, "verifying"):
                meta = checkpoint.verify(folder, world)
            with _seconds(row, world, "loading"):
                checkpoint.load(folder, {"actor": engine}, meta)
        world.barrier()  # a rank may still be reading the folder, which is removed next
    return row


def _engine(layout: Layout) -> MegatronEngine:
    import torch
    from transformers import Qwen3Config

    from megarl.config.training import EngineConfig, OptimConfig
    from megarl.training.engine import MegatronEngine
    from megarl.training.sharded_state import engine_slices

    engine = MegatronEngine(
        Qwen3Config(**MODEL),
        layout.parallel,
        EngineConfig(),
        OptimConfig(),
        dtype=torch.bfloat16,
        layout=layout,
        total_steps=1,
        weights=lambda chunks: None,
    )
    # Makes the optimizer state, and touches every page of it.
    for part in engine_slices("actor", engine, writing=False):
        part.data.fill_(0.5)
    return engine


@contextlib.contextmanager
def _seconds(row: dict[str, Any], world: WorkerGroup, name: str) -> Iterator[None]:
    """Measure wall and CPU-seconds of the block, which all ranks begin together."""
    world.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    yield
    row[f"{name}_s"], row[f"{name}_cpu_s"] = time.perf_counter() - start, time.process_time() - cpu


@contextlib.contextmanager
def _peak_memory(row: dict[str, Any], name: str) -> Iterator[None]:
    """Measure how far the block raises this process's anonymous memory, sampled every 5 ms."""
    before, done = _anonymous(), threading.Event()
    peak = [before]

    def watch() -> None:
        while not done.wait(0.005):
            peak.append(_anonymous())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join()
    row[name] = (max(peak) - before) / 1e9


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    """Start as many ranks as the argument says; in a process that is one of these ranks, measure."""
    if "RANK" in os.environ:
        result = measure()
        if os.environ["RANK"] == "0":
            print(json.dumps(result), flush=True)
        os._exit(0)
    from megarl.system.processes import free_port

    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="megarl-bench-", dir=os.environ.get("TMPDIR")) as folder:
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
                               "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FOLDER": folder}  # fmt: skip
        command = [sys.executable, "-m", __spec__.name, str(ranks)]
        started = [subprocess.Popen(command, env=shared | {"RANK": str(rank)}) for rank in range(ranks)]
        codes = [process.wait() for process in started]
        if any(codes):
            sys.exit(f"exit codes of the ranks: {codes}")


if __name__ == "__main__":
    main()
