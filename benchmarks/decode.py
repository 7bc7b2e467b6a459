"""Embedded generation by itself: seconds of decoding two fixed cases, against the matmul floor of this machine.

    python benchmarks/decode.py                # cases S and M, bf16 and fp32; one process, and one process per core
    python benchmarks/decode.py --case M --dtype bf16 --processes 2 --out decode.json

Case S: 2.4M parameters, 32 prompts x 8 samples, 16 new tokens. Case M: 19M parameters, 16 prompts x 8 samples, 256 new
tokens. End tokens are ignored, so the work is the same in every run. The floor is 2 x parameters x tokens FLOP at the
rate this machine reaches in a 2048-cubed matmul of the same dtype, measured in the same processes. Numbers mean
something only while nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS, VOCAB = 12, 64
COMMON = {"model_type": "qwen3", "vocab_size": VOCAB, "tie_word_embeddings": True, "head_dim": 64}
CASES: dict[str, dict[str, Any]] = {
    "S": {
        "model": {
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
        },
        "prompts": 32,
        "samples": 8,
        "new_tokens": 16,
        "repeat": 9,
    },
    "M": {
        "model": {
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 1024,
        },
        "prompts": 16,
        "samples": 8,
        "new_tokens": 256,
        "repeat": 2,
    },
}


def main() -> None:
    args = parse()
    if os.environ.get("RANK") is not None:
        run_rank(args)
        return
    cores = len(os.sched_getaffinity(0))
    shapes = [args.processes] if args.processes else sorted({1, cores})
    results = [
        launch(case, dtype, processes, max(1, cores // processes))
        for case in ([args.case] if args.case else CASES)
        for dtype in ([args.dtype] if args.dtype else ["bf16", "fp32"])
        for processes in shapes
    ]
    report = {"machine": machine(), "results": results}
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["machine"]))
    for r in results:
        print(
            f"{r['case']} {r['dtype']} {r['processes']} x {r['threads']}: {r['wall_s']:.3f} s "
            f"({r['cpu_s']:.3f} CPU-s, {r['tokens_per_s']:.0f} tokens/s), floor {r['floor_s']:.3f} s at "
            f"{r['matmul_gflops']:.0f} GFLOP/s, {r['wall_s'] / r['floor_s']:.2f} x floor"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--dtype", choices=["bf16", "fp32"])
    parser.add_argument("--processes", type=int)
    parser.add_argument("--out", help="file for the JSON report")
    return parser.parse_args()


def machine() -> dict[str, Any]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": ?")
    return {
        "cpu": model.split(":")[1].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def launch(case: str, dtype: str, processes: int, threads: int) -> dict[str, Any]:
    """Run one setting in fresh processes with the environment that the CPU launcher gives to workers."""
    from megarl.launchers.common import KEEP_FREED_MEMORY

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = (
        os.environ
        | KEEP_FREED_MEMORY
        | {
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
        }
    )
    command = [sys.executable, __file__, "--case", case, "--dtype", dtype]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    lines = [rank.communicate(timeout=900)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")
    return json.loads(lines[0].splitlines()[-1])


def run_rank(args: argparse.Namespace) -> None:
    """One data-parallel rank; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    case = CASES[args.case]
    chunks = build(case, args.dtype)
    parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    rate = matmul_rate(args.dtype)
    walls, cpus = decode(case, chunks, rank, size)
    total = torch.tensor([rate, *cpus], dtype=torch.float64)
    dist.all_reduce(total)
    tokens = case["prompts"] * case["samples"] * case["new_tokens"]
    wall = statistics.median(walls)
    if rank == 0:
        result = {
            "case": args.case,
            "dtype": args.dtype,
            "processes": size,
            "threads": threads,
            "parameters": parameters,
            "wall_s": wall,
            "walls_s": walls,
            "cpu_s": statistics.median(total[1:].tolist()),
            "tokens_per_s": tokens / wall,
            "flop": 2 * parameters * tokens,
            "matmul_gflops": float(total[0]) / 1e9,
            "floor_s": 2 * parameters * tokens / float(total[0]),
        }
        print(json.dumps(result))
    dist.destroy_process_group()


def build(case: dict[str, Any], dtype: str) -> list[Any]:
    from megarl.config.model import ModelConfig, ParallelConfig
    from megarl.config.training import EngineConfig
    from megarl.device import DTYPES
    from megarl.models.build import build_policy
    from megarl.models.config import transformer_config
    from megarl.models.hf import load_hf_config
    from megarl.models.weights import init_random
    from megarl.training.parallel import init_parallel

    init_parallel(ParallelConfig())
    hf = load_hf_config(ModelConfig(hf_config={**COMMON, **case["model"], "max_position_embeddings": 1024}))
    chunks = build_policy(hf, transformer_config(hf, ParallelConfig(), dtype=DTYPES[dtype], engine=EngineConfig()))
    init_random(chunks, hf, 0)
    return chunks


def matmul_rate(dtype: str) -> float:
    """FLOP/s of this process in a large matmul, all processes at it together."""
    import torch
    import torch.distributed as dist

    from megarl.device import DTYPES

    a = torch.randn(2048, 2048).to(DTYPES[dtype])
    best = 0.0
    for _ in range(6):
        dist.barrier()
        start = time.perf_counter()
        a @ a
        best = max(best, 2 * 2048**3 / (time.perf_counter() - start))
    return best


def decode(case: dict[str, Any], chunks: list[Any], rank: int, size: int) -> tuple[list[float], list[float]]:
    """Wall seconds until the slowest rank is done and this rank's CPU seconds, per repetition; the first is dropped."""
    import torch.distributed as dist

    from megarl.config.rollout import RolloutConfig, SamplingConfig
    from megarl.rollout.embedded.engine import EmbeddedEngine
    from megarl.rollout.engine import Request

    engine = EmbeddedEngine(chunks, RolloutConfig())
    prompts = range(rank, case["prompts"], size)
    requests = [
        Request([(7 * i + j) % VOCAB for j in range(PROMPT_TOKENS)], [100 * i + k for k in range(case["samples"])])
        for i in prompts
    ]
    sampling = SamplingConfig(max_new_tokens=case["new_tokens"], ignore_eos=True)
    walls, cpus = [], []
    for _ in range(case["repeat"] + 1):
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        engine.generate(requests, sampling, [])
        cpus.append(time.process_time() - cpu)
        dist.barrier()
        walls.append(time.perf_counter() - start)
    return walls[1:], cpus[1:]


if __name__ == "__main__":
    main()
