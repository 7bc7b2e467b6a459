"""Bounds the memory that malloc keeps for reuse.

A training step frees almost everything it took, and malloc keeps it, which is what makes the next step fast
(`cluster.keep_freed_memory`). But steps differ, free blocks of one size do not serve another, and each of glibc's heaps
grows to its own largest need: what is in use stays the same while the resident set creeps up, by a quarter in 1,000
steps of the quickstart. Whole free pages can be given back, and the next step pays a page fault for each that it takes
again (about 0.4 s a GB); so can what is kept for large batches (`megarl.data.room`). So it must not happen in every
step: only when the resident set has grown by a tenth since the last time, which the quickstart reaches a few times in a
run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megarl.data.room import heap_trim, rooms

GROWTH = 1.1
"""Resident set, relative to that of the first steps after the last trim, at which free pages are given back."""
SETTLE = 10
"""Steps until the resident set after a trim is that of a step again: kinds of memory come back one by one."""


class HeapBound:
    """Gives free pages back when the resident set has grown; call `after_step` at the end of every step.

    Args:
        resident: bytes resident now.
        trim: gives free pages back to the kernel.

    Attributes:
        trims: how often it happened.
    """

    def __init__(self, resident: Callable[[], int], trim: Callable[[], object]) -> None:
        self._resident, self._trim = resident, trim
        self._floor = self._steps = self.trims = 0

    def after_step(self) -> None:
        """Measure, and trim when it is time."""
        now = self._resident()
        self._steps += 1
        if self._steps <= SETTLE:
            self._floor = max(self._floor, now)
        elif now > GROWTH * self._floor:
            self._trim()
            self.trims += 1
            self._floor = self._steps = 0


def heap_bound() -> HeapBound:
    """Of this process; where malloc cannot give pages back (no glibc), only `megarl.data.room` does."""
    malloc_trim = heap_trim()
    if malloc_trim is None:
        return HeapBound(resident_bytes, rooms.give_back)

    def trim() -> None:
        rooms.give_back()
        malloc_trim(0)

    return HeapBound(resident_bytes, trim)


def resident_bytes() -> int:
    """Bytes of this process in memory; 0 where /proc is not there."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
