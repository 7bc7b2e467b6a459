"""What changed between two versions of a bucket: positions and new values of its 8-byte words.

After a step in bf16 most elements have not moved, and those that have are spread over all tensors. Positions are
written as distances, in as few bytes as the largest distance needs: about a tenth of what an index and a value would
take. Byte-wise compression of the rest gains little and costs more time than a fast network needs to carry it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WORD = 8
_BLOCK = 1 << 15  # words compared at a time: the verdicts, 32 kB, are still in the cache when they are counted
_DISTANCES = (torch.uint8, torch.uint16, torch.int32)


@dataclass(frozen=True)
class Delta:
    """Changed words of a bucket.

    Attributes:
        distances: [n], from one changed word to the next, the first from word -1.
        values: int64 [n], what they are now.
        tail: the bytes after the last whole word, always sent.
    """

    distances: Tensor
    values: Tensor
    tail: Tensor

    @property
    def nbytes(self) -> int:
        """Size on the wire."""
        return self.distances.nbytes + self.values.nbytes + self.tail.nbytes

    def to_bytes(self) -> list[memoryview]:
        """Four buffers; the first names the type of the distances."""
        code = torch.tensor([_DISTANCES.index(self.distances.dtype)], dtype=torch.uint8)
        parts = (code, self.distances, self.values, self.tail)
        return [memoryview(part.contiguous().view(torch.uint8).numpy()) for part in parts]

    @classmethod
    def from_bytes(cls, parts: list[bytearray]) -> Delta:
        """The counterpart of `to_bytes`."""
        dtypes = (_DISTANCES[parts[0][0]], torch.int64, torch.uint8)
        made = [
            torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
            for part, dtype in zip(parts[1:], dtypes, strict=True)
        ]
        return cls(*made)


def make_delta(base: Tensor, new: Tensor) -> tuple[Delta, Tensor]:
    """The delta from `base` to `new`, both uint8 [n] on the CPU, and the positions of the changed words."""
    whole = len(new) // WORD * WORD
    old_words, new_words = base[:whole].view(torch.int64), new[:whole].view(torch.int64)
    at = _differing(old_words, new_words)
    distances = torch.diff(at, prepend=at.new_full((1,), -1))
    largest = int(distances.max()) if len(at) else 0
    dtype = next(d for d in _DISTANCES if largest <= torch.iinfo(d).max)
    return Delta(distances.to(dtype), new_words[at], new[whole:].clone()), at


def _differing(old: Tensor, new: Tensor) -> Tensor:
    """Positions where two int64 [n] on the CPU differ, rising. Reads each once; equal blocks cost little more."""
    a, b, found = old.numpy(), new.numpy(), [np.empty(0, np.int64)]
    for start in range(0, len(a), _BLOCK):
        at = np.flatnonzero(a[start : start + _BLOCK] != b[start : start + _BLOCK])
        at += start
        found.append(at)
    return torch.from_numpy(np.concatenate(found))


def positions(delta: Delta) -> Tensor:
    """Numbers of the changed words, int64."""
    return delta.distances.to(torch.int64).cumsum(0) - 1


def apply_delta(flat: Tensor, delta: Delta) -> None:
    """Bring `flat`, uint8 [n], forward in place."""
    whole = len(flat) // WORD * WORD
    flat[:whole].view(torch.int64)[positions(delta)] = delta.values
    flat[whole:] = delta.tail
