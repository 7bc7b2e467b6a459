"""Memory for large copies, which is used again: the first write to a page costs more than the copy of it.

In pages of 4 kB the first write to a gigabyte stops 262,144 times for the kernel. So the kernel is asked for large
pages, and what nobody uses any more is kept for the next who asks. There is never more of it, used or kept, than has
been in use at the same time.
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
_STEP = 8  # sizes of one kind: an eighth of a power of two apart, so that the samples of the next step fit, too


class Rooms:
    """Hands out memory, and takes it back when the last view of it is gone, in whatever thread that happens.

    Attributes:
        used: bytes handed out.
        kept: bytes that wait to be used again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._back: deque[mmap.mmap] = deque()  # which nobody uses any more, and is not counted yet
        self._spare: list[mmap.mmap] = []  # the longest kept first
        self.used = self.kept = self._most = 0

    def take(self, size: int) -> np.ndarray:
        """uint8 [size], not initialised, writable; it comes back with the last view of it."""
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
        """What is kept goes back to the system."""
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
        """The smallest that is large enough, and not too large for what asks."""
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


#: Of this process.
rooms = Rooms()


@functools.cache
def heap_trim() -> Callable[[int], object] | None:
    """glibc's malloc_trim, which gives free pages back to the kernel; None with another C library."""
    try:
        malloc_trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
        malloc_trim.argtypes = [ctypes.c_size_t]  # type: ignore[attr-defined]
    except (OSError, AttributeError):
        return None
    return malloc_trim
