"""Caches of running samples with one entry per position: keys and values, or what another kind of layer has.

Shapes: n rows, G key/value heads of this rank, D head size, L cached positions.

The CPU and the GPU need different memory layouts. On a CPU, batched matmul is fast only over contiguous [n*G, L, D]
blocks and allocation is expensive, so each layer owns a flat buffer that is re-laid out when L changes (every 32
tokens; the copy goes to a spare buffer, which then swaps places, and costs a few percent of the attention that it
speeds up: 1.0 ms instead of 1.7 ms a layer at n=64, L=160, bf16). On a GPU the layout is fixed, because captured graphs
need fixed addresses.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.passes import Room

_STEP = 32


def _round_up(length: int) -> int:
    """Return the next cache length: a multiple of 32, coarser for long samples so that re-layouts stay rare."""
    step = max(_STEP, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


class PositionCache:
    """A cache of positions (`megarl.models.layers.passes.Store`): `tensors` tensors [rows, G, L, D] per layer."""

    def __init__(self, tensors: int, heads: int, head_dim: int, layers: int, room: Room) -> None:
        slots, max_length, dtype, device, fixed = room.slots, room.max_length, room.dtype, room.device, room.fixed
        self.slots, self.max_length, self.heads, self.head_dim, self.fixed = slots, max_length, heads, head_dim, fixed
        self.device = device
        size = slots * max_length * heads * head_dim
        self._buffers = [[torch.empty(size, dtype=dtype, device=device) for _ in range(layers)] for _ in range(tensors)]
        # Padded batches read and mask rows that were never written. Fill them with 0, because 0 * NaN is NaN.
        if fixed:
            for flat in itertools.chain(*self._buffers):
                flat.zero_()
        self._spare = None if fixed else torch.empty(size, dtype=dtype, device=device)
        self.length = max_length if fixed else 0
        self._head_index = torch.arange(heads, device=device)

    def _view(self, flat: Tensor, length: int) -> Tensor:
        """Return a flat buffer as [rows, G, length, D]; a remainder that fills no row is left out."""
        row = self.heads * length * self.head_dim
        return flat[: flat.numel() // row * row].view(-1, self.heads, length, self.head_dim)

    def views(self, layer: int) -> list[Tensor]:
        """Return the layer's cached tensors (such as keys and values) as views [rows, G, L, D]; the contents of rows
        that are not running are undefined.
        """
        return [self._view(buffers[layer], self.length) for buffers in self._buffers]

    def reserve(self, rows: int, needed: int) -> None:
        """Resize to at least `needed` positions if fewer or far more are allocated; keep the first `rows` rows."""
        if self.fixed or needed <= self.length <= 2 * _round_up(needed):
            return
        new = min(self.max_length, _round_up(needed))
        copied, spare = min(new, self.length), self._spare
        assert spare is not None, "a cache with one layout has its full length"
        for buffers in self._buffers:
            for layer, flat in enumerate(buffers):
                if rows and copied:
                    self._view(spare, new)[:rows, :, :copied] = self._view(flat, self.length)[:rows, :, :copied]
                    # Zero the unwritten positions: they are masked, but 0 * NaN is NaN in the product with the values.
                    self._view(spare, new)[:rows, :, copied:] = 0
                buffers[layer], spare = spare, flat
        self.length, self._spare = new, spare

    def fill(self, layer: int, rows: Tensor, *tensors: Tensor) -> None:
        """Write whole prompts, tensors [m, G, P, D], into `rows` [m], and zero the positions after them."""
        for cache, new in zip(self.views(layer), tensors, strict=True):
            cache[rows, :, : new.shape[2]] = new
            cache[rows, :, new.shape[2] :] = 0

    def clear(self, rows: Tensor) -> None:
        """Zero `rows`, for samples whose first decode step is at position 0."""
        for layer in range(len(self._buffers[0])):
            for cache in self.views(layer):
                cache[rows] = 0

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` to `targets` in all layers; all rows are read before any row is written."""
        for layer in range(len(self._buffers[0])):
            for cache in self.views(layer):
                cache[targets] = cache[sources]

    def flat_index(self, positions: Tensor) -> Tensor:
        """Return the indices [n * G] of position `positions[i]` of row i in a layer viewed as [rows * G * L, D], for G
        key/value heads and L positions."""
        rows = torch.arange(len(positions), device=positions.device)
        return ((rows[:, None] * self.heads + self._head_index) * self.length + positions[:, None]).flatten()

    def append(self, layer: int, index: Tensor, *tensors: Tensor) -> None:
        """Write one position per row: tensors [n, G, D] at `index` from `flat_index`."""
        for cache, new in zip(self.views(layer), tensors, strict=True):
            cache.view(-1, self.head_dim).index_copy_(0, index, new.reshape(-1, self.head_dim))


class KVCache(PositionCache):
    """The keys and values of softmax attention."""

    def __init__(self, mixer: Attention, layers: int, room: Room) -> None:
        super().__init__(2, mixer.groups // room.tp, mixer.width, layers, room)

    @staticmethod
    def bytes_per_row(mixer: Attention, layers: int, max_length: int, tp: int, dtype: torch.dtype) -> int:
        """Return the cache's bytes per sample on this rank, including its share of the spare buffer for resizing."""
        return (2 * layers + 1) * max_length * (mixer.groups // tp) * mixer.width * dtype.itemsize

    def keys(self, layer: int) -> Tensor:
        """Return a layer's keys as a view [rows, G, L, D]; rows without a running sample are undefined."""
        return self.views(layer)[0]

    def values(self, layer: int) -> Tensor:
        """Return a layer's values as a view [rows, G, L, D]; rows without a running sample are undefined."""
        return self.views(layer)[1]
