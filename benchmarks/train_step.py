"""One optimizer step of the Megatron engine, timed against the GEMM floor of this machine.

    python -m benchmarks.train_step                              # 19M parameters, 128 x (14 + 256) tokens, bf16
    python -m benchmarks.train_step --dtype fp32 --procs 2 --threads 1 --micro 4096 8192 16384
    python -m benchmarks.train_step --sequences 32 --profile     # where the time of a step goes

Prints seconds (wall and CPU), tokens/s, TFLOP of the model's matrix products (forward once, backward twice) and what
share of the GEMM rate measured just before was reached, and the peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def step_flop(sequences: int, length: int) -> float:
    """Floating-point operations of one step's matrix products: 6 per weight and token, and causal attention."""
    hidden, head = MODEL["hidden_size"], MODEL["head_dim"]
    heads, groups = MODEL["num_attention_heads"], MODEL["num_key_value_heads"]
    layer = hidden * head * (2 * heads + 2 * groups) + 3 * hidden * MODEL["intermediate_size"]
    weights = MODEL["num_hidden_layers"] * layer + hidden * MODEL["vocab_size"]
    attention = 6 * MODEL["num_hidden_layers"] * heads * head * length  # half of 12: causal
    return sequences * length * (6.0 * weights + attention)


def gemm_rate(dtype: torch.dtype, tokens: int, seconds: float = 1.0) -> float:
    """Measured GEMM rate of this process in FLOP/s, on the shape of the model's largest product."""
    a = torch.randn(tokens, MODEL["hidden_size"]).to(dtype)
    b = torch.randn(MODEL["hidden_size"], 2 * MODEL["intermediate_size"]).to(dtype)
    torch.mm(a, b)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(a, b)
        count += 1
    return count * 2 * a.numel() * b.shape[1] / (time.perf_counter() - start)


def make_batch(sequences: int, prompt: int, response: int) -> Any:
    """Random samples of one length, with equal weights."""
    from megarl.data.batch import Batch, Jagged

    rng = torch.Generator().manual_seed(0)
    draw = lambda n: [torch.randint(0, MODEL["vocab_size"], (n,), generator=rng) for _ in range(sequences)]  # noqa: E731
    weight = 1.0 / (sequences * response)
    return Batch(
        {
            "prompt_ids": Jagged.from_list(draw(prompt)),
            "response_ids": Jagged.from_list(draw(response)),
            "loss_weights": Jagged.from_list([torch.full((response,), weight) for _ in range(sequences)]),
        }
    )


def make_engine(dtype: str, micro: int) -> Any:
    """Fresh engine, data parallel over all processes."""
    from transformers import AutoConfig

    from megarl.config.model import ParallelConfig
    from megarl.config.training import EngineConfig, OptimConfig
    from megarl.models.weights import init_random
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import init_parallel

    fields = dict(MODEL)
    hf = AutoConfig.for_model(fields.pop("model_type"), **fields)
    layout = init_parallel(ParallelConfig())
    return MegatronEngine(
        hf,
        ParallelConfig(),
        EngineConfig(micro_batch_tokens=micro),
        OptimConfig(lr=1e-4),
        dtype=DTYPES[dtype],
        layout=layout,
        total_steps=100,
        weights=lambda chunks: init_random(chunks, hf, 0),
    )


def run(args: argparse.Namespace, micro: int) -> dict[str, Any]:
    """Measure steps with one micro-batch budget."""
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = make_engine(args.dtype, micro)
    batch = make_batch(args.sequences, args.prompt, args.response).split([args.sequences // size] * size)[rank]
    if args.profile:
        profile(engine, batch)
    walls, cpus = [], []
    for _ in range(args.steps + 1):  # the first warms up
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        engine.sft_step(batch)
        walls.append(time.perf_counter() - start)
        cpus.append(time.process_time() - cpu)
    seconds = min(walls[1:])
    length = args.prompt + args.response - 1
    rate = gemm_rate(DTYPES[args.dtype], 8192) * size
    flop = step_flop(args.sequences, length)
    return {
        "dtype": args.dtype,
        "processes": size,
        "threads": args.threads,
        "micro_batch_tokens": micro,
        "seconds": round(seconds, 3),
        "cpu_seconds_per_process": round(min(cpus[1:]), 3),
        "tokens_per_s": round(args.sequences * length / seconds),
        "tflop": round(flop / 1e12, 3),
        "gemm_gflops": round(rate / 1e9),
        "gemm_floor_s": round(flop / rate, 3),
        "times_the_floor": round(seconds * rate / flop, 2),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def profile(engine: Any, batch: Any) -> None:
    """Print the operators that cost most CPU time in one step."""
    engine.sft_step(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as record:
        engine.sft_step(batch)
    if dist.get_rank() == 0:
        print(record.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))
        by_shape = record.key_averages(group_by_input_shape=True)
        print(by_shape.table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=40))


def main(args: argparse.Namespace, rank: int, port: int) -> None:
    """Body of one process."""
    torch.set_num_threads(args.threads)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(args.procs), LOCAL_RANK=str(rank), OMP_NUM_THREADS=str(args.threads)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    for micro in args.micro:
        found = run(args, micro)
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--procs", type=int, default=1, help="data-parallel processes")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads per process")
    parser.add_argument("--micro", type=int, nargs="+", default=[8192], help="micro-batch token budgets to try")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=14)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def launch(args: argparse.Namespace) -> int:
    """Start the processes as the launchers do on a CPU: glibc reads its settings when a process starts."""
    from megarl.launchers.common import KEEP_FREED_MEMORY

    for name, value in KEEP_FREED_MEMORY.items():
        os.environ.setdefault(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=main, args=(args, rank, port)) for rank in range(args.procs)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    raise SystemExit(launch(parse()))
