"""CUDA graphs of the decode step, one per (rows, length) bucket, alive for one call of `generate`.

A decode step of a small model is bound by kernel launches; replaying it as one graph removes them. Padded rows of a
bucket belong to a dump sample and write into cache rows that nobody owns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def row_bucket(rows: int, slots: int) -> int:
    """Smallest of 1, 2, 4, 8, then multiples of 8 up to 64 and of 32 above, that holds `rows`; at most `slots`."""
    if rows <= 8:
        size = 1 << (rows - 1).bit_length()
    else:
        step = 8 if rows <= 64 else 32
        size = -(-rows // step) * step
    return min(size, slots)


def length_bucket(needed: int, max_length: int) -> int:
    """Smallest of 128, 256, 512, ... that holds `needed`; at most `max_length`."""
    return min(max(128, 1 << (needed - 1).bit_length()), max_length)


class DecodeGraphs:
    """Captures `step(rows, length, lockstep)` on first use of a bucket and replays it afterwards.

    Args:
        step: works on the first `rows` rows of persistent buffers and changes `numbers` and `done` in place.
        numbers: int64 [4, slots], the row state: sample, token, position, count.
        done: bool [slots].
        idle: number of the dump sample that padded rows belong to.
    """

    def __init__(self, step: Callable[[int, int, int], None], numbers: Tensor, done: Tensor, idle: int) -> None:
        self._step, self._numbers, self._done = step, numbers, done
        self._slots = numbers.shape[1]
        self._pad = torch.tensor([[idle], [0], [0], [0]], device=numbers.device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: tuple[int, int] | None = None

    def run(self, rows: int, needed: int, max_length: int) -> None:
        """One decode step of `rows` rows that reads up to `needed` positions."""
        key = (row_bucket(rows, self._slots), length_bucket(needed, max_length))
        self._numbers[:, rows : key[0]] = self._pad
        if key not in self._graphs:
            self._capture(key)
        self._graphs[key].replay()

    def _capture(self, key: tuple[int, int]) -> None:
        """Record a bucket. The warm-up run, which libraries need before capture, is undone."""
        saved = self._numbers.clone(), self._done.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(*key, key[0])
        torch.cuda.current_stream().wait_stream(stream)
        self._numbers.copy_(saved[0])
        self._done.copy_(saved[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(*key, key[0])
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
