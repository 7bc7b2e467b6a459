"""Microseconds of the head's Triton kernels by size of their blocks, on a GPU: `python -m megarl.benchmarks.logits`.

The table that it prints is what `STATISTICS` and `GRADIENTS` of `megarl.kernels.logits_gpu` are chosen from.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: Columns of a block, warps of a program.
CHOICES = tuple(itertools.product((1024, 2048, 4096, 8192), (4, 8, 16)))


def calls(
    tokens: int, columns: int, device: str
) -> Iterator[tuple[str, int, Callable[[tuple[int, int]], torch.Tensor]]]:
    """Yield each kernel's name, the bytes that it moves, and a call with a choice; logits are random."""
    from megarl.kernels import logits_gpu

    logits = torch.randn(tokens, columns, device=device)
    targets = torch.randint(0, columns, (tokens,), device=device)
    out, ones = torch.empty(4, tokens, device=device), torch.ones(tokens, device=device)
    place: dict[str, Any] = {"start": 0, "inverse_temperature": 1.0}
    given = targets, ones, ones, ones, ones, torch.bfloat16

    def statistics(launch: tuple[int, int]) -> torch.Tensor:
        logits_gpu.statistics(logits, targets, out, entropy=True, launch=launch, **place)
        return out

    yield "statistics", 4 * logits.numel(), statistics
    yield "gradients", 6 * logits.numel(), lambda launch: logits_gpu.gradients(logits, *given, launch=launch, **place)


def main(argv: list[str] | None = None) -> int:
    """Print a line for each kernel and choice; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="as actor.engine.logits_chunk_tokens")
    parser.add_argument("--columns", type=int, default=151_936, help="of the vocabulary, on one rank")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this needs a GPU: a CPU has only the interpreter of Triton", file=sys.stderr)
        return 2
    from triton.testing import do_bench

    print(f"{torch.cuda.get_device_name()}, {options.tokens} tokens, {options.columns} columns")
    for name, size, call in calls(options.tokens, options.columns, "cuda"):
        for launch in CHOICES:
            milliseconds = do_bench(functools.partial(call, launch))
            rate = size / milliseconds / 1e6
            print(f"{name}: block {launch[0]}, warps {launch[1]}: {1e3 * milliseconds:.0f} us, {rate:.0f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
