"""Threads that read samples of a data set before they are used: `data.loader_workers`.

Reading a sample means decoding, resizing and cutting up its images, which runs outside Python's global lock; everything
else of a sample has been in memory since the start.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import Protocol

from megarl.data.batch import Batch

#: Samples to read: pairs of an epoch and dataset indices, in the order of the batch.
Pieces = Sequence[tuple[int, Sequence[int]]]


class Indexed(Protocol):
    """A data set whose rows a loader reads by index."""

    fingerprint: str

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the samples at `indices` as they are in `epoch`. Several threads may call it at the same time."""
        ...


class ReadAhead:
    """Batches of a data set, read by `workers` threads; without workers they are read when they are taken.

    An exception of a thread is raised by the `take` of its batch.
    """

    def __init__(self, dataset: Indexed, workers: int = 0) -> None:
        self._dataset, self._workers = dataset, workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="megarl-loader") if workers else None
        self._begun: dict[Hashable, list[Future[Batch]]] = {}

    @property
    def is_on(self) -> bool:
        """Whether there are threads that read."""
        return self._pool is not None

    def begin(self, name: Hashable, pieces: Pieces) -> None:
        """Begin to read a batch under `name`; do nothing without workers, or if the batch has begun already."""
        if self._pool is not None and name not in self._begun:
            shares = _cut(pieces, self._workers)
            self._begun[name] = [self._pool.submit(self._read, share) for share in shares]

    def take(self, name: Hashable, pieces: Pieces) -> Batch:
        """Return the batch `name` of the samples `pieces`, which is waited for if it has begun."""
        self.begin(name, pieces)
        parts = self._begun.pop(name, None)
        return self._read(pieces) if parts is None else Batch.concat([part.result() for part in parts])

    def forget(self) -> None:
        """Drop all batches that were not taken."""
        for parts in self._begun.values():
            for part in parts:
                part.cancel()
        self._begun.clear()

    def close(self) -> None:
        """End the threads, each after the samples that it is reading; nothing may be read afterwards."""
        self.forget()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _read(self, pieces: Pieces) -> Batch:
        return Batch.concat([self._dataset.batch(list(indices), epoch) for epoch, indices in pieces])


def _cut(pieces: Pieces, parts: int) -> list[Pieces]:
    """Cut the samples of `pieces` into at most `parts` shares of nearly equal size, in order; at least one share."""
    places = [(epoch, index) for epoch, indices in pieces for index in indices]
    if not places:
        return [pieces]  # an empty batch still has the fields of its data set
    bounds = [len(places) * part // parts for part in range(parts + 1)]
    shares = [places[low:high] for low, high in pairwise(bounds) if high > low]
    return [
        [(epoch, [index for _, index in run]) for epoch, run in groupby(share, key=lambda place: place[0])]
        for share in shares
    ]
