"""Microseconds of the Triton kernels of a decode step, on a GPU: `python -m megarl.benchmarks.decode`.

The tables that it prints are what `ATTENTION` and `DRAWING` of `megarl.kernels.decode_gpu` are chosen from.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ATTENTION = ((256, 64, 4, 3), (256, 32, 4, 4), (256, 128, 4, 2), (512, 64, 4, 3), (512, 128, 8, 2), (1024, 64, 4, 3),
             (128, 64, 4, 2), (256, 64, 2, 3), (256, 64, 8, 3), (512, 64, 2, 4), (256, 128, 8, 2))  # fmt: skip
DRAWING = ((16384, 2048, 8), (16384, 1024, 4), (8192, 2048, 8), (32768, 2048, 8), (16384, 4096, 8), (16384, 2048, 4),
           (8192, 1024, 4), (151_936, 4096, 16))  # fmt: skip


def attention(rows: int, reach: int, groups: int, per: int, size: int) -> tuple[float, Callable[..., object]]:
    """Return the bytes that a call reads, and the call with its launch: rows at 1/2 to all of `reach` positions."""
    from megarl.kernels import decode_gpu

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    qkv, norm, rope = random(rows, groups, per + 2, size), random(2, size), (random(rows, size // 2),) * 2
    keys, values = (random(rows, groups, reach + 8, size) for _ in range(2))
    positions = torch.randint(reach // 2, reach, (rows,), device="cuda")
    nbytes = 4.0 * groups * size * int(positions.sum())
    call = functools.partial(decode_gpu.attend, qkv, norm, rope, keys, values, positions)
    return nbytes, lambda launch: call(window=None, scale=size**-0.5, eps=1e-6, launch=launch)


def drawing(rows: int, columns: int) -> tuple[float, Callable[..., object]]:
    """Return the bytes of logits, and the call with its launch."""
    from megarl.kernels import decode_gpu

    logits = torch.randn(rows, columns, device="cuda")
    seeds = torch.arange(rows, device="cuda")
    call = functools.partial(decode_gpu.draw, logits, seeds, seeds, start=0, inverse_temperature=1.0, greedy=False)
    return 4.0 * logits.numel(), lambda launch: call(launch=launch)


def table(name: str, nbytes: float, call: Callable[..., object], launches: tuple[tuple[int, ...], ...]) -> None:
    """Print a line for every launch."""
    from triton.testing import do_bench

    for launch in launches:
        milliseconds = do_bench(functools.partial(call, launch), return_mode="median")
        print(
            f"{name}: launch {launch}: {1e3 * milliseconds:.0f} us, {nbytes / milliseconds / 1e6:.0f} GB/s", flush=True
        )


def main(argv: list[str] | None = None) -> int:
    """Print the tables; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", type=int, default=151_936, help="of the vocabulary, on one rank")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this needs a GPU: a CPU has only the interpreter of Triton", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name())
    for rows, reach, groups, per in ((256, 640, 8, 2), (256, 2048, 8, 2), (16, 8192, 8, 4), (64, 4096, 8, 8)):
        name = f"attend, {rows} rows of up to {reach}, {groups} x {per} heads of 128"
        table(name, *attention(rows, reach, groups, per, 128), ATTENTION)
    for rows in (256, 16):
        table(f"draw, {rows} x {options.columns}", *drawing(rows, options.columns), DRAWING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
