"""The place of a local tensor in a named whole tensor, cut into slices.

A slice is a contiguous local tensor with the offset of its first element in the whole tensor. Ranks of any layout hold
slices: a tensor-parallel shard is one slice; elements 100 to 900 of a flattened shard, which is what a data-parallel
rank owns of its optimizer state, are at most 2 * dims - 1 slices (the end of a row, whole rows, the start of a row):

    . . . . . .         offset (1, 4) shape (1, 2)
    . . . . a a         offset (2, 0) shape (2, 6)
    b b b b b b   ->    offset (4, 0) shape (1, 3)
    b b b b b b
    c c c . . .

So one layout reads what another layout wrote by copying where slices overlap, and no rank gathers a whole tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.system.compat import megatron as compat

compat.install()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402  (after install)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """Contiguous local `data` whose first element is element `offset` of the tensor `key` of shape `whole`."""

    key: str
    whole: Shape
    offset: Shape
    data: Tensor
    # the whole tensor's size depends on the layout; elements that another layout lacks are padding
    padded: bool = False


class SlicePlace(NamedTuple):
    """A contiguous part of a local tensor that begins at element `start` and is a slice of the whole tensor `key`."""

    key: str
    whole: Shape
    offset: Shape
    shape: Shape
    start: int
    padded: bool


def places_of(sharded: ShardedTensor | ShardedTensorFactory) -> list[SlicePlace]:
    """Return the places of a local tensor's contiguous parts in the saved tensors: two for a fused gate and up
    projection, else one."""
    # On the meta device: a factory returns views, whose offsets show which elements they cover.
    blank = torch.empty(sharded.data.shape, dtype=sharded.data.dtype, device="meta")
    moved = dataclasses.replace(sharded, data=blank)
    pieces = list(nested_values(moved.build())) if isinstance(moved, ShardedTensorFactory) else [moved]
    places = []
    for piece in pieces:
        if not piece.data.is_contiguous():
            raise ValueError(f"cannot save {piece.key}: this part of the parameter is not contiguous")
        shape = (1,) * piece.prepend_axis_num + tuple(piece.data.shape)
        whole, offset = tuple(piece.global_shape), tuple(piece.global_offset)
        start, padded = piece.data.storage_offset(), piece.allow_shape_mismatch
        places.append(SlicePlace(piece.key, whole, offset, shape, start, padded))
    return places


def slices_of(places: Sequence[SlicePlace], data: Tensor, start: int = 0, prefix: str = "") -> Iterator[TensorSlice]:
    """Yield the slices that cover `data`, the flat elements of a local tensor from `start` on."""
    data = data.detach().view(-1)
    for place in places:
        first = max(start, place.start)
        last = min(start + data.numel(), place.start + math.prod(place.shape))
        for offset, shape in cut(place.shape, first - place.start, last - place.start):
            count = math.prod(shape)
            at = tuple(a + b for a, b in zip(place.offset, offset, strict=True))
            part = data[first - start : first - start + count].view(shape)
            yield TensorSlice(prefix + place.key, place.whole, at, part, place.padded)
            first += count


def cut(shape: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield (offset, shape) of the slices that cover elements `start` to `end` - 1 of a row-major tensor, in order.

    >>> list(cut((5, 6), 10, 27))
    [((1, 4), (1, 2)), ((2, 0), (2, 6)), ((4, 0), (1, 3))]
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the first whole row, and one past the last whole row
    if first > last:
        yield from _in_row(shape, last, start - last * row, end - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < end:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: Shape, row: int, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    for offset, size in cut(shape[1:], start, end):
        yield (row, *offset), (1, *size)


def overlap(offset: Shape, shape: Shape, other: Shape, other_shape: Shape) -> tuple[tuple[slice, ...], ...] | None:
    """Return the common part of two slices as indices into each of them; None if they do not overlap."""
    first, second = [], []
    for a, size, b, other_size in zip(offset, shape, other, other_shape, strict=True):
        low, high = max(a, b), min(a + size, b + other_size)
        if low >= high:
            return None
        first.append(slice(low - a, high - a))
        second.append(slice(low - b, high - b))
    return tuple(first), tuple(second)
