"""The difference between two versions of a bucket: positions and new values of its elements.

After a step in bf16 most elements have not changed, and the changed ones are spread over all tensors. Positions are
stored as one-byte distances, so a changed bf16 element takes three bytes: a third of an int64 index and a value.
Compressing the delta further gains little and takes longer than a fast network needs to send it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.kernels.delta import diff, patch
from megarl.sync.plan import Entry


@dataclass(frozen=True)
class Delta:
    """The changed elements of a bucket's tensors, tensor by tensor."""

    counts: Tensor  # int64 [tensors], number of written elements of each tensor
    distances: Tensor  # uint8 [sum of counts], from `megarl.kernels.delta.diff`
    values: Tensor  # uint8, the bytes of the written elements

    @property
    def nbytes(self) -> int:
        """Size of the delta in bytes."""
        return self.counts.nbytes + self.distances.nbytes + self.values.nbytes

    @property
    def touched(self) -> list[int]:
        """Indices of the bucket's tensors that have changed elements."""
        numbers: list[int] = self.counts.nonzero().view(-1).tolist()
        return numbers

    def to_bytes(self) -> list[memoryview]:
        """Return the delta as three byte buffers."""
        return [part.view(torch.uint8).numpy().data for part in (self.counts, self.distances, self.values)]

    @classmethod
    def from_bytes(cls, parts: Sequence[bytearray]) -> Delta:
        """Restore a delta from the buffers of `to_bytes`."""
        counts, *rest = (torch.frombuffer(part, dtype=torch.uint8) if part else _NOTHING for part in parts)
        return cls(counts.view(torch.int64), *rest)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def make_delta(base: Sequence[Tensor], new: Sequence[Tensor], itemsizes: Sequence[int], limit: int) -> Delta | None:
    """Update `base` to `new` in place and return the changes.

    Args:
        base, new: uint8, the bytes of each tensor of a bucket, on the CPU.
        itemsizes: bytes of an element of each tensor.
        limit: largest size of the delta in bytes.

    Returns:
        The delta; None if it would exceed `limit`; then `base` has been updated only in part.
    """
    counts, distances, values = [], [_NOTHING], [_NOTHING]
    left = limit - 8 * len(base)
    for old, now, itemsize in zip(base, new, itemsizes, strict=True):
        changes = diff(old, now, itemsize, max(left, 0) // (1 + itemsize))
        if changes is None:
            return None
        counts.append(len(changes[0]))
        if counts[-1]:
            distances.append(changes[0])
            values.append(changes[1])
            left -= counts[-1] * (1 + itemsize)
    return Delta(torch.tensor(counts, dtype=torch.int64), torch.cat(distances), torch.cat(values))


def apply_delta(parts: Sequence[Tensor], itemsizes: Sequence[int], delta: Delta) -> None:
    """Apply a delta in place to `parts`, uint8, the bytes of each tensor.

    Raises:
        ValueError: the delta does not belong to these tensors.
    """
    if len(parts) != len(delta.counts):
        raise ValueError(f"a delta of {len(delta.counts)} tensors does not fit a bucket of {len(parts)} tensors")
    at = byte = 0
    for part, itemsize, count in zip(parts, itemsizes, delta.counts.tolist(), strict=True):
        if count:
            values = delta.values[byte : byte + count * itemsize]
            patch(part, delta.distances[at : at + count], values, itemsize)
        at, byte = at + count, byte + count * itemsize


def patch_header(entries: Sequence[Entry], delta: Delta) -> list[Any]:
    """Return the description of a delta for receivers: name, shape, dtype and count of each changed tensor."""
    counted = zip(entries, delta.counts.tolist(), strict=True)
    return [[e.name, e.shape, e.dtype, count] for e, count in counted if count]
