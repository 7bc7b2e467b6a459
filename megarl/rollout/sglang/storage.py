"""Predicts how the ranks of an SGLang server store a model, by applying `ServerLayout` to tensors without data that
record of which boxes (rectangular parts) of checkpoint tensors they consist.

Running servers describe their storage themselves. Benchmarks and tests plan updates of servers that do not run with the
prediction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megarl.rollout.sglang.layout import ServerLayout
from megarl.sync.shards.boxes import (
    DIMS,
    BoxRule,
    BoxTable,
    ParameterTable,
    RankStorage,
    TensorTable,
    padded_shape,
)


@dataclass(frozen=True, slots=True)
class _Block:
    """A view of a box (a rectangular part) of a checkpoint tensor, or of zeros.

    Attributes:
        tensor: number of the tensor; -1: zeros.
        spans: [start, stop) in the tensor, for each dimension of the view.
        axes: for each dimension of the view, which dimension of the tensor it is.
    """

    tensor: int
    spans: tuple[tuple[int, int], ...]
    axes: tuple[int, ...]

    def cut(self, dim: int, start: int, stop: int) -> _Block:
        low = self.spans[dim][0]
        spans = (*self.spans[:dim], (low + start, low + stop), *self.spans[dim + 1 :])
        return _Block(self.tensor, spans, self.axes)

    def size(self, dim: int) -> int:
        return self.spans[dim][1] - self.spans[dim][0]


class TracedTensor:
    """A tensor without data that records of which boxes (rectangular parts) of checkpoint tensors it consists.

    The class has the operations of `torch.Tensor` that `ServerLayout.parts` uses.

    Args:
        blocks: the boxes, which are concatenated along the first dimension.
    """

    def __init__(self, blocks: Sequence[_Block]) -> None:
        self.blocks = tuple(block for block in blocks if block.size(0)) or tuple(blocks[:1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all dimensions."""
        first = self.blocks[0]
        return (sum(block.size(0) for block in self.blocks), *(first.size(d) for d in range(1, len(first.spans))))

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def __getitem__(self, rows: slice) -> TracedTensor:
        start, stop, _ = rows.indices(len(self))
        return self.part(0, start, max(start, stop))

    def part(self, dim: int, start: int, stop: int) -> TracedTensor:
        """Return the slice [start, stop) along dimension `dim`."""
        if dim:
            return TracedTensor([block.cut(dim, start, stop) for block in self.blocks])
        parts, before = [], 0
        for block in self.blocks:
            size = block.size(0)
            low, high = min(max(start - before, 0), size), min(max(stop - before, 0), size)
            parts.append(block.cut(0, low, high))
            before += size
        return TracedTensor(parts)

    def chunk(self, chunks: int, dim: int = 0) -> Sequence[TracedTensor]:
        """Return the tensor cut into `chunks` parts of equal size along a dimension, as `torch.chunk` does."""
        size = self.shape[dim]
        ends = [*range(0, size, -(-size // chunks)), size]
        return _Parts(self, dim, ends)

    def split(self, sizes: Sequence[int], dim: int = 0) -> Sequence[TracedTensor]:
        """Return the tensor cut into consecutive parts of these sizes along a dimension, as `torch.split` does."""
        return _Parts(self, dim, [0, *itertools.accumulate(sizes)])

    def transpose(self, first: int, second: int) -> TracedTensor:
        """Return the tensor with two dimensions exchanged; it must be one part of one checkpoint tensor."""
        (block,) = self.blocks
        order = list(range(len(block.axes)))
        order[first], order[second] = order[second], order[first]
        return TracedTensor(
            [_Block(block.tensor, tuple(block.spans[d] for d in order), tuple(block.axes[d] for d in order))]
        )

    def float(self) -> TracedTensor:
        """Return the tensor itself, because the record of its parts does not depend on the dtype."""
        return self

    bfloat16 = float

    def new_zeros(self, *shape: int) -> TracedTensor:
        """Return a tensor of zeros of this shape."""
        return TracedTensor([_Block(-1, tuple((0, size) for size in shape), tuple(range(len(shape))))])

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.cat:
            return cls([block for part in args[0] for block in part.blocks])
        if function is torch.zeros_like:
            return args[0].new_zeros(*args[0].shape)
        return NotImplemented


class _Parts(Sequence[TracedTensor]):
    """Consecutive parts of a tensor along a dimension, each created when it is read, because a rank reads only one.

    Args:
        ends: index at which the first part begins, and at which each part ends.
    """

    def __init__(self, whole: TracedTensor, dim: int, ends: Sequence[int]) -> None:
        self._whole, self._dim, self._ends = whole, dim, ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._whole.part(self._dim, self._ends[number], self._ends[number + 1])


def predicted_storage(
    layout: ServerLayout, rank: int, tensors: TensorTable, shapes: Mapping[str, tuple[int, ...]]
) -> RankStorage:
    """Predict how `rank` of a server stores the tensors that an update sends.

    Parameters in the result have the shape [elements, 1, 1], because a layout only has their sizes, and the dtypes that
    tensors have on the wire.

    Args:
        tensors: the tensors of an update.
        shapes: shape of each tensor by name, as in a checkpoint.
    """
    names: dict[str, int] = {}
    sizes: list[int] = []
    dtypes: list[str] = []
    filled: list[int] = []
    rows: list[tuple[int, ...]] = []  # columns: tensor, 3 x (lo, hi), parameter, offset, 3 strides, rule
    for number, (name, dtype) in enumerate(zip(tensors.names.tolist(), tensors.dtypes.tolist(), strict=True)):
        if not layout.needs(rank, name):
            continue
        shape = shapes[name]
        whole = TracedTensor([_Block(number, tuple((0, size) for size in shape), tuple(range(len(shape))))])
        for parameter, part, numel in layout.parts(rank, name, cast(Tensor, whole)):
            at = names.setdefault(parameter, len(names))
            if at == len(sizes):
                sizes.append(numel)
                dtypes.append(dtype)
                filled.append(0)
            for block in cast(TracedTensor, part).blocks:
                size = math.prod([stop - start for start, stop in block.spans])
                rows.append(_row(block, at, filled[at]))
                filled[at] += size
    table = np.array(rows, np.int64).reshape(-1, 4 + 3 * DIMS)
    corners = table[:, 1 : 1 + 2 * DIMS].reshape(-1, DIMS, 2)
    boxes = BoxTable(
        tensor=table[:, 0],
        lo=corners[:, :, 0],
        hi=corners[:, :, 1],
        parameter=table[:, 1 + 2 * DIMS],
        offset=table[:, 2 + 2 * DIMS],
        strides=table[:, 3 + 2 * DIMS : 3 + 3 * DIMS],
        rule=table[:, -1],
    )
    lengths = np.array([[size, 1, 1] for size in sizes], np.int64).reshape(-1, DIMS)
    return RankStorage(ParameterTable(np.array([*names], np.str_), lengths, np.array(dtypes, np.str_)), boxes)


def _row(block: _Block, parameter: int, offset: int) -> tuple[int, ...]:
    """Return the row of `BoxTable` for a box (a part of a tensor) whose view is stored in row-major order from `offset`
    in a parameter."""
    spans, axes = list(block.spans), list(block.axes)
    sizes = [stop - start for start, stop in spans]
    if len(spans) > DIMS:  # merge the last dimensions, which no layout splits or transposes
        sizes = list(padded_shape(sizes))
        spans, axes = [*spans[: DIMS - 1], (0, sizes[-1])], axes[:DIMS]
    steps = [math.prod(sizes[dim + 1 :]) if sizes[dim] > 1 else 0 for dim in range(len(sizes))]
    corners, strides = [(0, 1)] * DIMS, [0] * DIMS
    for span, axis, step in zip(spans, axes, steps, strict=True):
        corners[axis], strides[axis] = span, step
    rule = BoxRule.ZERO if block.tensor < 0 else BoxRule.COPY
    if block.tensor < 0:
        corners = [(0, size) for size in (*sizes, 1, 1)][:DIMS]
        strides = [*steps, 0, 0][:DIMS]
    return (block.tensor, *(number for span in corners for number in span), parameter, offset, *strides, rule)
