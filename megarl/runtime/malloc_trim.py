"""Returns free memory to the kernel when the resident set of a process has grown.

A training step frees almost everything it took, and malloc keeps it, which makes the next step fast
(`cluster.keep_freed_memory`). But steps differ, free blocks of one size do not serve another, and each of glibc's heaps
grows to its own largest need. So the memory in use stays the same while the resident set creeps up, by a quarter in
1,000 steps of the quickstart. Whole free pages can be given back, and the next step pays a page fault for each that it
takes again (about 0.4 s a GB); so can the memory kept for large batches (`megarl.data.buffer_pool`). This must not
happen in every step: only when the resident set has grown by a tenth since the last time, which the quickstart reaches
a few times in a run.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.data.buffer_pool import buffer_pool, find_malloc_trim

GROWTH = 1.1
"""Free pages are given back when the resident set is this many times that of the first steps after the last trim."""
SETTLE = 10
"""Steps after a trim until the resident set is that of a step again: kinds of memory come back one by one."""


class MallocTrim:
    """The rule that gives free pages back when the resident set has grown; `after_step` ends every step.

    Args:
        resident: bytes resident now.
        trim: gives free pages back to the kernel.

    Attributes:
        trims: number of times that pages were given back.
    """

    def __init__(self, resident: Callable[[], int], trim: Callable[[], object]) -> None:
        self._resident, self._trim = resident, trim
        self._floor = self._steps = self.trims = 0

    def after_step(self) -> None:
        """Measure the resident set and give pages back if it has grown."""
        now = self._resident()
        self._steps += 1
        if self._steps <= SETTLE:
            self._floor = max(self._floor, now)
        elif now > GROWTH * self._floor:
            self._trim()
            self.trims += 1
            self._floor = self._steps = 0


def make_malloc_trim() -> MallocTrim:
    """Return the rule of this process; without glibc only `megarl.data.buffer_pool` gives pages back."""
    malloc_trim = find_malloc_trim()
    if malloc_trim is None:
        return MallocTrim(resident_bytes, buffer_pool.give_back)

    def trim() -> None:
        buffer_pool.give_back()
        malloc_trim(0)

    return MallocTrim(resident_bytes, trim)


def resident_bytes() -> int:
    """Return the bytes of this process in memory."""
    import psutil

    return int(psutil.Process().memory_info().rss)
