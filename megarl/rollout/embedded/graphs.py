"""Shape buckets of decoding on a GPU, and CUDA graphs of the decode step, one per shape.

Libraries plan a kernel for each new shape and stride, which takes longer than the kernel itself. On a GPU the rows, the
cache size and (if torch computes the attention) the cached positions are therefore rounded up to buckets, so that
similar calls of `generate` have equal shapes. A decode step of a small model is bound by kernel launches; replaying it
as one graph removes them. Padded rows of a bucket belong to a dummy sample and write into unused cache rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def row_bucket(rows: int, slots: int) -> int:
    """Return the smallest of 1, 2, 4, 8, then multiples of 8 up to 64 and of 32 above, that holds `rows`; at most
    `slots`."""
    if rows <= 8:
        size = 1 << (rows - 1).bit_length()
    else:
        step = 8 if rows <= 64 else 32
        size = -(-rows // step) * step
    return min(size, slots)


def slots_below(fit: int) -> int:
    """Return the largest number of rows up to `fit` that `row_bucket` returns."""
    return next(rows for rows in range(fit, 0, -1) if row_bucket(rows, rows + 32) == rows)


def cache_length(longest: int) -> int:
    """Round `longest` up to the positions of a cache: by an eighth at most (by up to 64 for short sequences)."""
    step = max(64, 1 << max(0, (longest - 1).bit_length() - 4))
    return -(-longest // step) * step


def length_bucket(needed: int, max_length: int) -> int:
    """Return the smallest of 128, 256, 512, ... that holds `needed`; at most `max_length`."""
    return min(max(128, 1 << (needed - 1).bit_length()), max_length)


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the CUDA stream of all graph captures on a device and of their warm-up runs.

    cuBLAS keeps a workspace (32 MiB on an H100) for every stream it has used until the process ends, so a stream per
    capture would leak memory.
    """
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """The CUDA graphs of decode steps, captured on first use of a shape and replayed afterwards.

    `run` receives `step`, a method of the owner, with every call. Stored here, it would be a reference cycle that keeps
    the owner's cache alive until Python's next cycle collection, maybe many calls of `generate` later.

    Args:
        numbers: int64 [4, slots], the state of each row: sample, token, position, count.
        done: bool [slots], whether the row's sample has finished.
    """

    def __init__(self, numbers: Tensor, done: Tensor) -> None:
        self._numbers, self._done = numbers, done
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def run(self, step: Callable[[int, int, int], None], rows: int, length: int) -> None:
        """Replay `step(rows, length, rows)`, all of whose rows run, as a CUDA graph, which is captured the first time.

        `step` must use persistent buffers and change state in place.
        """
        key = (rows, length)
        if key not in self._graphs:
            self._capture(step, key)
        self._graphs[key].replay()

    def _capture(self, step: Callable[[int, int, int], None], key: tuple[int, int]) -> None:
        """Capture the graph of a (rows, length) bucket, after a warm-up run whose state changes are undone."""
        saved = self._numbers.clone(), self._done.clone()
        stream = capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(*key, key[0])
        torch.cuda.current_stream().wait_stream(stream)
        self._numbers.copy_(saved[0])
        self._done.copy_(saved[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            step(*key, key[0])
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
