"""CPU kernels for deltas: find the changes between two versions of a tensor, and apply them, in one pass each.

delta.cpp is compiled like cpu.cpp. Without a compiler, or if the library's results differ, `diff_reference` and
`patch_reference` do the same with numpy.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megarl.kernels.build import compiled

FAR = 255  # largest distance between two elements that a delta lists, stored as one byte
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_LINE = 64  # bytes that the kernels compare at a time
_BLOCK = 1 << 17  # bytes that the NumPy reference compares at a time, so that results stay in the processor's cache
_SOURCE = Path(__file__).with_suffix(".cpp")
_P, _I = ctypes.c_void_p, ctypes.c_int64


class DeltaKernels:
    """The compiled kernels that list and apply changes of weights."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._diff, self._patch = library.megarl_diff, library.megarl_patch
        self._diff.argtypes, self._diff.restype = [_I, _P, _P, _I, _P, _P, _I], _I
        self._patch.argtypes, self._patch.restype = [_I, _P, _I, _P, _P, _I], _I

    def diff(self, base: Tensor, new: Tensor, itemsize: int, room: int) -> tuple[Tensor, Tensor] | None:
        """Find the changed elements as the function `diff` does, in C."""
        n = len(new) // itemsize
        room = min(room, n)
        distances = torch.empty(room, dtype=torch.uint8)
        values = torch.empty(room * itemsize, dtype=torch.uint8)
        pointers = base.data_ptr(), new.data_ptr(), n, distances.data_ptr(), values.data_ptr()
        count = self._diff(itemsize, *pointers, room)
        return None if count < 0 else (distances[:count], values[: count * itemsize])

    def patch(self, base: Tensor, distances: Tensor, values: Tensor, itemsize: int) -> None:
        """Write changed elements into `base` as the function `patch` does, in C."""
        n = len(base) // itemsize
        pointers = base.data_ptr(), n, distances.data_ptr(), values.data_ptr()
        if self._patch(itemsize, *pointers, len(distances)) < 0:
            raise _outside(n)


def diff(base: Tensor, new: Tensor, itemsize: int, room: int) -> tuple[Tensor, Tensor] | None:
    """Update `base` to `new` in place and return what changed.

    Args:
        base, new: uint8 [n * itemsize], contiguous on the CPU.
        itemsize: bytes of an element: 1, 2 or 4.
        room: largest number of elements that may be listed.

    Returns:
        distances, uint8 [m], from each listed element to the next (the first from element -1), and their new values,
            uint8 [m * itemsize]. Between two changed elements that are too far apart for one distance, unchanged
            elements are listed as well. None if `room` is not enough; `base` may then be partly updated.
    """
    kernels = _load()
    return (diff_reference if kernels is None else kernels.diff)(base, new, itemsize, room)


def patch(base: Tensor, distances: Tensor, values: Tensor, itemsize: int) -> None:
    """Write the result of `diff` into `base`, uint8 [n * itemsize] on the CPU.

    Raises:
        ValueError: an element is outside of `base`, or `values` does not have `itemsize` bytes per element.
    """
    if len(values) != len(distances) * itemsize:
        raise ValueError(
            f"a delta with {len(distances)} changed elements has {len(values)} bytes of values, not {itemsize} for each"
        )
    kernels = _load()
    (patch_reference if kernels is None else kernels.patch)(base, distances, values, itemsize)


def diff_reference(base: Tensor, new: Tensor, itemsize: int, room: int) -> tuple[Tensor, Tensor] | None:
    """Find the changed elements as `diff` does, in NumPy."""
    dtype = _WORDS[itemsize]
    old_words, new_words = base.view(dtype).numpy(), new.view(dtype).numpy()
    step, changed = _BLOCK // itemsize, [np.empty(0, np.int64)]
    for start in range(0, len(new_words), step):
        part = slice(start, start + step)
        changed.append(np.flatnonzero(old_words[part] != new_words[part]) + start)
    at = np.concatenate(changed)
    gaps = np.diff(at, prepend=-1)
    # Number of unchanged elements that are written before each changed one: a distance is one byte, at most FAR.
    between = (gaps - 1) // FAR
    if len(at) + between.sum() > room:
        return None
    last = np.cumsum(between + 1) - 1  # where `distances` has the distances that lead to changed elements
    distances = np.full(len(at) + between.sum(), FAR, np.uint8)
    distances[last] = gaps - between * FAR
    written = np.cumsum(distances, dtype=np.int64) - 1
    old_words[at] = new_words[at]
    return torch.from_numpy(distances), torch.from_numpy(new_words[written].view(np.uint8))


def patch_reference(base: Tensor, distances: Tensor, values: Tensor, itemsize: int) -> None:
    """Write changed elements into `base` as `patch` does, in NumPy."""
    at = positions(distances)
    if len(at) and (int(distances.min()) == 0 or int(at[-1]) * itemsize >= len(base)):
        raise _outside(len(base) // itemsize)
    dtype = _WORDS[itemsize]
    base.view(dtype)[at] = values.view(dtype)


def _outside(elements: int) -> ValueError:
    return ValueError(
        f"the delta changes elements outside of this tensor of {elements} elements, so it was made for another tensor; "
        "send the whole tensor instead"
    )


def positions(distances: Tensor) -> Tensor:
    """Return the indices of a delta's elements, int64, from the distances between them."""
    return distances.to(torch.int64).cumsum(0) - 1


def check(library: ctypes.CDLL) -> str | None:
    """Compare the compiled C functions with the references in Python on random input; return what differs, or None."""
    kernels, generator = DeltaKernels(library), torch.Generator("cpu").manual_seed(1)
    for itemsize, n, share in itertools.product(_WORDS, (1, 15, 64, 65, 257, 5003), (0.002, 0.1, 1.0)):
        # A wrong kernel may write up to one line past the end, so this line is allocated and checked for changes.
        room = n * itemsize + _LINE
        base = torch.randint(0, 256, (room,), generator=generator, dtype=torch.uint8, device="cpu")
        changed = torch.rand(room, generator=generator, dtype=torch.float32, device="cpu") < share / itemsize
        new, end = base + changed, n * itemsize
        old, then, right = base.clone(), base.clone(), base.clone()
        expected = diff_reference(right[:end], new[:end], itemsize, n)
        result = kernels.diff(old[:end], new[:end], itemsize, n)
        # `diff_reference` returns None only if the delta lists more than `n` elements, which cannot happen here.
        assert expected is not None
        if result is None or not all(map(torch.equal, (*result, old), (*expected, right))):
            return f"diff of {n} elements of {itemsize} bytes"
        if len(expected[0]) and kernels.diff(base.clone()[:end], new[:end], itemsize, len(expected[0]) - 1) is not None:
            return f"diff of {n} elements of {itemsize} bytes with too little room"
        kernels.patch(then[:end], *expected, itemsize)
        if not torch.equal(then, right):
            return f"patch of {n} elements of {itemsize} bytes"
    return None


@functools.cache
def _load() -> DeltaKernels | None:
    library = compiled(_SOURCE, check)
    return None if library is None else DeltaKernels(library)
