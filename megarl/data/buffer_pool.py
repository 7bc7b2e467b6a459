"""A pool of memory for large copies: the first write to a page costs more than the copy into it.

With pages of 4 kB the first write to a gigabyte stops 262,144 times for the kernel. So the pool asks the kernel for
large pages and keeps unused memory for the next request. Used and kept memory together never exceed the largest amount
that was in use at one time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

_LARGE = 4 << 20  # below, the allocator's own memory has been written to before
_STEP = 8  # sizes of one kind: an eighth of a power of two apart, so that samples of the next step fit, too


class BufferPool:
    """A pool that hands out memory and takes it back when its last view is gone, in whatever thread that happens.

    Attributes:
        used: bytes handed out.
        kept: bytes that are free for reuse.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._back: deque[mmap.mmap] = deque()  # unused again, and not counted yet
        self._spare: list[mmap.mmap] = []  # the longest kept first
        self.used = self.kept = self._most = 0

    def take(self, size: int) -> np.ndarray:
        """Return writable memory, uint8 [size], not initialised; the pool gets it back with its last view."""
        if size < _LARGE:
            return np.empty(size, dtype=np.uint8)
        with self._lock:
            self._count()
            memory = self._fitting(size) or self._new(size)
            self.used += len(memory)
            self._most = max(self._most, self.used)
        # Every view, of numpy or of torch, keeps the first array of this memory alive, however it was derived.
        whole = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(whole, self._back.append, memory).atexit = False
        return whole[:size]

    def give_back(self) -> None:
        """Return the kept memory to the system."""
        with self._lock:
            self._count()
            self._spare.clear()
            self.kept, self._most = 0, self.used

    def _count(self) -> None:
        while self._back:
            memory = self._back.popleft()
            self._spare.append(memory)
            self.used, self.kept = self.used - len(memory), self.kept + len(memory)

    def _fitting(self, size: int) -> mmap.mmap | None:
        """Take the smallest kept block that is large enough and at most twice as large."""
        found = [memory for memory in self._spare if size <= len(memory) <= 2 * size]
        if not found:
            return None
        best = min(found, key=len)
        self._drop(best)
        return best

    def _new(self, size: int) -> mmap.mmap:
        part = 1 << max(0, size.bit_length() - 1)
        length = -(-size // (part // _STEP)) * (part // _STEP)
        while self._spare and self.used + self.kept + length > self._most:
            self._drop(self._spare[0])
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _drop(self, memory: mmap.mmap) -> None:
        self._spare = [one for one in self._spare if one is not memory]
        self.kept -= len(memory)


#: The pool of this process.
buffer_pool = BufferPool()


@functools.cache
def find_malloc_trim() -> Callable[[int], object] | None:
    """Return glibc's malloc_trim, which gives free pages back to the kernel; None with another C library."""
    try:
        malloc_trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
        malloc_trim.argtypes = [ctypes.c_size_t]  # type: ignore[attr-defined]
    except (OSError, AttributeError):
        return None
    return malloc_trim
