"""Variable-length sequences stored end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Index: TypeAlias = Sequence[int] | Tensor


def as_index(index: Index, size: int, device: torch.device) -> Tensor:
    """Return positions as an int64 tensor on `device`. A bool mask [size] gives the positions of its true entries.

    Raises:
        IndexError: the index does not have one dimension, the mask's length is not `size`, or a position on the CPU is
            outside [0, size).
    """
    tensor = torch.as_tensor(index, device=device)
    if tensor.ndim != 1:
        raise IndexError(f"the index must have one dimension, got shape {tuple(tensor.shape)}")
    if tensor.dtype == torch.bool:
        if len(tensor) != size:
            raise IndexError(f"the mask has {len(tensor)} entries for {size} samples")
        return tensor.nonzero().squeeze(1)
    tensor = tensor.to(torch.int64)
    if len(tensor) and tensor.device.type == "cpu":
        low, high = torch.aminmax(tensor)
        if int(low) < 0 or int(high) >= size:
            raise IndexError(f"index {int(low if low < 0 else high)} is outside the {size} samples")
    return tensor


@dataclass(frozen=True, eq=False)
class Jagged:
    """B sequences stored as one tensor.

    >>> j = Jagged.from_list([[1, 2], [], [3]])
    >>> j.lengths.tolist(), j.select([2, 0]).values.tolist()
    ([2, 0, 1], [3, 1, 2])
    """

    values: Tensor  # [total, ...] of any dtype; sequence i is `values[offsets[i]:offsets[i + 1]]`
    offsets: Tensor  # int64 [B + 1] on the device of `values`; starts at 0, never decreases, ends at `total`

    def __post_init__(self) -> None:
        values, offsets = self.values, self.offsets
        if offsets.dtype != torch.int64 or offsets.ndim != 1 or len(offsets) == 0:
            raise ValueError(f"offsets must be int64 [B + 1], got {offsets.dtype} {tuple(offsets.shape)}")
        if values.ndim == 0:
            raise ValueError("values must be [total, ...], got a scalar")
        if values.device != offsets.device:
            raise ValueError(
                f"values and offsets must be on one device, but values are on {values.device}, offsets on "
                f"{offsets.device}"
            )
        # Offsets on a GPU are not checked, because reading them would stall its stream.
        if offsets.device.type == "cpu":
            ends = (int(offsets[0]), int(offsets[-1]))
            if ends != (0, len(values)) or bool((offsets[1:] < offsets[:-1]).any()):
                raise ValueError(
                    f"offsets must start with 0, not decrease, and end with {len(values)}, got {offsets.tolist()[:16]}"
                )

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor | Sequence[int]) -> Jagged:
        """Cut `values` [total, ...] into sequences of the given lengths [B]."""
        sizes = torch.as_tensor(lengths, dtype=torch.int64, device=values.device)
        offsets = torch.zeros(len(sizes) + 1, dtype=torch.int64, device=values.device)
        torch.cumsum(sizes, 0, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def from_list(cls, rows: Iterable[Tensor | Sequence], dtype: torch.dtype | None = None) -> Jagged:
        """Concatenate rows (tensors [n_i, ...] or Python sequences).

        `dtype` is only needed for Python rows without any element.
        """
        rows = list(rows)
        if any(isinstance(row, Tensor) for row in rows):
            tensors = [torch.as_tensor(row) if dtype is None else torch.as_tensor(row, dtype=dtype) for row in rows]
            return cls.from_lengths(torch.cat(tensors), [len(t) for t in tensors])
        flat = [item for row in rows for item in row]
        return cls.from_lengths(torch.tensor(flat, dtype=dtype), [len(row) for row in rows])

    @classmethod
    def concat(cls, parts: Sequence[Jagged]) -> Jagged:
        """Return all sequences of `parts` in order; `parts` must not be empty."""
        values = torch.cat([part.values for part in parts])
        return cls.from_lengths(values, torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Length of each sequence, int64 [B]."""
        return self.offsets.diff()

    @property
    def dtype(self) -> torch.dtype:
        """Element type of `values`."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of `values` and `offsets`."""
        return self.values.device

    def sum(self) -> Tensor:
        """Return the sum of each sequence of integers or bools, int64 [B]."""
        before = torch.zeros(len(self.values) + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(self.values, 0, out=before[1:])
        return before[self.offsets].diff()

    def unbind(self) -> list[Tensor]:
        """Return the B sequences as views of `values`."""
        return list(self.values.split(self.lengths.tolist()))

    def like(self, values: Tensor) -> Jagged:
        """Return a Jagged with these values [total, ...] and the same offsets."""
        return Jagged(values, self.offsets)

    def to(self, device: torch.device | str) -> Jagged:
        """Return a copy on `device`, or itself if it is there already."""
        values, offsets = self.values.to(device), self.offsets.to(device)
        return self if values is self.values and offsets is self.offsets else Jagged(values, offsets)

    def slice(self, start: int, stop: int) -> Jagged:
        """Return sequences start..stop - 1; the values are a view."""
        offsets = self.offsets[start : stop + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        return Jagged(self.values[low:high], offsets - offsets[0])

    def select(self, index: Index) -> Jagged:
        """Return the sequences at `index` (positions, repeats allowed, or a bool mask), in that order, by one
        gather."""
        places, offsets = gather_plan(self.offsets, as_index(index, len(self), self.device))
        return Jagged(self.values.index_select(0, places), offsets)


def gather_plan(offsets: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the tokens of the sequences `picked` (int64 [K]) are: indices (int64 [tokens]), offsets [K + 1]."""
    lengths = offsets.diff()[picked]
    out = torch.zeros(len(picked) + 1, dtype=torch.int64, device=offsets.device)
    torch.cumsum(lengths, 0, out=out[1:])
    # Token t of the result comes from place t + (old offset of its sequence) - (new offset).
    places = torch.repeat_interleave(offsets[:-1][picked] - out[:-1], lengths)
    places += torch.arange(len(places), device=offsets.device)
    return places, out
