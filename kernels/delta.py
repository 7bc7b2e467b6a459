"""CPU kernels of deltas: what changed between two versions of a tensor, and bringing a copy forward, in one pass each.

delta.cpp is compiled like cpu.cpp; without a compiler `diff_reference` and `patch_reference` do the same with numpy.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megarl.kernels.cpu import compiled

FAR = 255  # the largest distance between two written elements
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_BLOCK = 1 << 17  # bytes compared at a time by the reference, so that verdicts are still in the cache when counted
_P, _I = ctypes.c_void_p, ctypes.c_int64


def diff(base: Tensor, new: Tensor, itemsize: int, room: int) -> tuple[Tensor, Tensor] | None:
    """Bring `base` to `new` and tell what changed.

    Args:
        base, new: uint8 [n * itemsize], contiguous on the CPU.
        itemsize: bytes of an element: 1, 2 or 4.
        room: elements that may be written at most.

    Returns:
        distances, uint8 [m], from one written element to the next, the first from element -1; and their new values,
        uint8 [m * itemsize]. Where two changed elements are further apart than a distance can say, elements between
        them are written that did not change. None when `room` is not enough; `base` is then neither of both.
    """
    kernels = _load()
    if kernels is None:
        return diff_reference(base, new, itemsize, room)
    n = len(new) // itemsize
    room = min(room, n)
    distances = torch.empty(room, dtype=torch.uint8)
    values = torch.empty(room * itemsize, dtype=torch.uint8)
    pointers = base.data_ptr(), new.data_ptr(), n, distances.data_ptr(), values.data_ptr()
    count = kernels.megarl_diff(itemsize, *pointers, room)
    return None if count < 0 else (distances[:count], values[: count * itemsize])


def patch(base: Tensor, distances: Tensor, values: Tensor, itemsize: int) -> None:
    """Write what `diff` found into `base`, uint8 [n * itemsize] on the CPU.

    Raises:
        ValueError: an element would lie outside.
    """
    if len(values) != len(distances) * itemsize:
        raise ValueError(f"{len(distances)} distances and {len(values)} bytes of values")
    kernels = _load()
    if kernels is None:
        patch_reference(base, distances, values, itemsize)
        return
    n = len(base) // itemsize
    pointers = base.data_ptr(), n, distances.data_ptr(), values.data_ptr()
    if kernels.megarl_patch(itemsize, *pointers, len(distances)) < 0:
        raise ValueError("a changed element lies outside of its tensor")


def diff_reference(base: Tensor, new: Tensor, itemsize: int, room: int) -> tuple[Tensor, Tensor] | None:
    """See `diff`."""
    dtype = _WORDS[itemsize]
    old_words, new_words = base.view(dtype).numpy(), new.view(dtype).numpy()
    step, found = _BLOCK // itemsize, [np.empty(0, np.int64)]
    for start in range(0, len(new_words), step):
        part = slice(start, start + step)
        found.append(np.flatnonzero(old_words[part] != new_words[part]) + start)
    at = np.concatenate(found)
    gaps = np.diff(at, prepend=-1)
    between = (gaps - 1) // FAR  # elements written on the way
    if len(at) + between.sum() > room:
        return None
    last = np.cumsum(between + 1) - 1  # where the changed elements come to stand
    distances = np.full(len(at) + between.sum(), FAR, np.uint8)
    distances[last] = gaps - between * FAR
    written = np.cumsum(distances, dtype=np.int64) - 1
    old_words[at] = new_words[at]
    return torch.from_numpy(distances), torch.from_numpy(new_words[written].view(np.uint8))


def patch_reference(base: Tensor, distances: Tensor, values: Tensor, itemsize: int) -> None:
    """See `patch`."""
    at = positions(distances)
    if len(at) and (int(distances.min()) == 0 or int(at[-1]) * itemsize >= len(base)):
        raise ValueError("a changed element lies outside of its tensor")
    dtype = _WORDS[itemsize]
    base.view(dtype)[at] = values.view(dtype)


def positions(distances: Tensor) -> Tensor:
    """Numbers of the written elements, int64."""
    return distances.to(torch.int64).cumsum(0) - 1


@functools.cache
def _load() -> ctypes.CDLL | None:
    library = compiled(Path(__file__).with_suffix(".cpp"))
    if library is not None:
        library.megarl_diff.argtypes, library.megarl_diff.restype = [_I, _P, _P, _I, _P, _P, _I], _I
        library.megarl_patch.argtypes, library.megarl_patch.restype = [_I, _P, _I, _P, _P, _I], _I
    return library
