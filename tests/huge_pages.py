"""Moves the memory of a process to huge pages, so that its forks start and end in a third of the time.

A process that has imported PyTorch, Megatron and transformers has 330 MB of memory of its own in 85,000 pages. A fork
copies an entry for each page, in 10 ms, and the end of the forked process takes 13 ms to drop these entries. With pages
of 2 MB both take 7 ms together. A page that a fork writes to is still copied in 4 kB.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_MADV_COLLAPSE = 25  # of Linux 6.1 and later; older kernels refuse it, and forks take as long as before
_SIZE = 2 << 20


def collapse() -> None:
    """Move all private memory of this process to huge pages, as far as the system can and permits it."""
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *path = line.split()
        if permissions == "rw-p" and path in ([], ["[heap]"]):
            start, end = (int(address, 16) // _SIZE for address in addresses.split("-"))
            first = start + 1  # the region begins within `start`, or just where it begins
            if end > first:
                madvise(first * _SIZE, (end - first) * _SIZE, _MADV_COLLAPSE)
