"""Memory for large copies, which the kernel hands out in large pages.

In pages of 4 kB the first write to a gigabyte stops 262,144 times for the kernel, which takes as long as the copy.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

_LARGE = 4 << 20  # below, the allocator's own memory has been written to before


def room(size: int) -> np.ndarray:
    """uint8 [size], not initialised, writable; it goes back to the system with the last view of it."""
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(size, dtype=np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
