"""What sums, gathers and scatters of processes on this machine take: `python -m megarl.benchmarks.gloo`.

Small ones as `WorkerGroup` makes them, beside those of gloo, and large ones as Megatron makes them. The best of several
rounds; `megarl.planning.assumptions` has for a CPU what comes out of this.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

ROUNDS, SMALL, LARGE = 3, 1 << 14, 1 << 26


def small_ones(number: int, tensor: Tensor) -> dict[str, Callable[[], object]]:
    """What happens in a layer while a batch is decoded, by name."""
    from megarl.comm import team_world

    workers = team_world(60.0)
    parts = [torch.empty_like(tensor) for _ in range(number)]
    return {
        "a sum, as WorkerGroup makes it": lambda: workers.all_reduce(tensor),
        "a sum by gloo": lambda: dist.all_reduce(tensor),
        "a gather": lambda: dist.all_gather(parts, tensor),
    }


def large_ones(number: int, tensor: Tensor) -> dict[str, Callable[[], object]]:
    """What happens to gradients and parameters, by name; a rank sends a share of `tensor`."""
    part = torch.empty(tensor.numel() // number)
    return {
        "a sum": lambda: dist.all_reduce(tensor),
        "a gather": lambda: dist.all_gather_into_tensor(tensor, part),
        "a scatter of sums": lambda: dist.reduce_scatter_tensor(part, tensor),
    }


def seconds(what: Callable[[], object], times: int) -> float:
    """Of one call, in the best of several rounds."""
    what()
    best = float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            what()
        best = min(best, (time.perf_counter() - begin) / times)
    return best


def measure(rank: int, number: int, port: int) -> None:
    """One process; the first one prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(number)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = []
    for name, what in small_ones(number, torch.zeros(SMALL // 4)).items():
        lines.append(f"{SMALL >> 10} KB, {name}: {seconds(what, 300) * 1e3:.2f} ms")
    for name, what in large_ones(number, torch.zeros(LARGE // 4)).items():
        sent = LARGE * (number - 1) / number * (2 if name == "a sum" else 1)
        lines.append(f"{LARGE >> 20} MB, {name}: {sent / seconds(what, 5) / 1e9:.2f} GB/s sent by each")
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    from torch.multiprocessing import spawn

    from megarl.rendezvous import listen

    parser = argparse.ArgumentParser(prog="python -m megarl.benchmarks.gloo", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    with listen("127.0.0.1", 0, one_machine=True) as listener:
        port = listener.getsockname()[1]
    spawn(measure, args=(given.processes, port), nprocs=given.processes)


if __name__ == "__main__":
    main()
