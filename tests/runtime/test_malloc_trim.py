"""What malloc keeps is given back when it has grown, and kept otherwise."""

from __future__ import annotations

import ctypes
import sys

import pytest

from megarl.runtime.malloc_trim import GROWTH, SETTLE, MallocTrim, make_malloc_trim


class Process:
    """A resident set: what steps use, and what malloc keeps on top until it is trimmed."""

    def __init__(self, used: int) -> None:
        self.used, self.kept, self.highest = used, 0, 0
        self.bound = MallocTrim(lambda: self.used + self.kept, self.trim)

    def trim(self) -> None:
        self.kept = 0

    def step(self, creep: int = 0) -> None:
        self.kept += creep
        self.highest = max(self.highest, self.used + self.kept)
        self.bound.after_step()


def test_a_creeping_heap_stays_bounded() -> None:
    process = Process(used=1000)
    for _ in range(10_000):
        process.step(creep=1)
    # One creep per step: 10 steps to settle, a tenth to grow, one step to notice.
    assert process.highest <= (1000 + SETTLE) * GROWTH + 1
    assert process.bound.trims <= 10_000 / 100


def test_a_steady_heap_is_never_trimmed() -> None:
    process = Process(used=1000)
    process.kept = 2000  # kept for the next step on purpose
    for number in range(1000):
        process.step(creep=50 if number % 2 else -50)
    assert process.bound.trims == 0


def test_steps_that_need_more_than_before_cost_one_trim() -> None:
    process = Process(used=1000)
    for number in range(1000):
        process.used = 1000 if number < 500 else 3000
        process.step()
    assert process.bound.trims == 1


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_trimming_gives_pages_back() -> None:
    bound = make_malloc_trim()
    blocks = [b"x" * 50_000 for _ in range(2000)]
    last = b"x" * 50_000  # keeps the end of the heap in use, so that free() by itself returns nothing
    before = bound._resident()
    del blocks
    freed = bound._resident()
    bound._trim()
    # 100 MB were free; half of them is far from any noise, and free() may have returned them before already.
    assert min(freed, bound._resident()) < before - 50_000_000
    assert sys.getsizeof(last) > 50_000
