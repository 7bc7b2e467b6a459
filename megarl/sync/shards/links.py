"""Finds the trainer ranks that hold what each server rank needs, and checks that a server rank's boxes (rectangular
parts of tensors) cover each of its parameters once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from megarl.sync.shards.boxes import DIMS, BoxRule, BoxTable, RankStorage, TensorTable, dtype_codes, row_major
from megarl.sync.shards.table import INSTEAD, Array, ColumnTable
from megarl.system.errors import UserError

_COUNTED = 1 << 24  # a parameter whose boxes are not rectangular in it is checked by element, up to this size


@dataclass(frozen=True, eq=False)
class HeldViews(ColumnTable):
    """Where trainer ranks store parts of boxes (rectangular parts of tensors). Columns as in `BoxTable`, and `dtype`:
    int8 [n], dtype of the parameter (`dtype_codes`)."""

    parameter: Annotated[Array, "i4"]
    offset: Annotated[Array, "i8"]
    strides: Annotated[Array, "i8", DIMS]
    dtype: Annotated[Array, "i1"]


@dataclass(frozen=True, eq=False)
class SharedBoxes:
    """The boxes (rectangular parts of tensors) that trainer ranks store, each listed once with all ranks that hold it.

    Attributes:
        tensor, lo, hi: the boxes, ordered by tensor: int32 [B], int64 [B, DIMS], int64 [B, DIMS].
        holders: int32 [B], for each box the index of its holders in `sets`.
        sets: the different sets of ranks that hold a box, each in ascending order.
        storage_of: int64 [N], number of each rank's storage; ranks that store the same boxes have the same number.
    """

    tensor: Array
    lo: Array
    hi: Array
    holders: Array
    sets: tuple[tuple[int, ...], ...]
    storage_of: Array
    _keys: Array  # box * storages + storage, ascending
    _parameter: Array
    _offset: Array
    _strides: Array
    _dtype: Array

    def views(self, boxes: Array, senders: Array, lo: Array) -> HeldViews:
        """Return where trainer rank `senders[i]` stores the part of box number `boxes[i]` (a part of a tensor) that
        begins at the tensor's index `lo[i]`."""
        at = np.searchsorted(self._keys, boxes * np.int64(self.storage_of.max() + 1) + self.storage_of[senders])
        strides = self._strides[at]
        offset = self._offset[at] + ((lo - self.lo[boxes]) * strides).sum(1)
        return HeldViews(self._parameter[at], offset, strides, self._dtype[at])


@dataclass(frozen=True, eq=False)
class NeedTable(ColumnTable):
    """The needs of server ranks: in each row a part of a box (a rectangular part of a tensor) that trainer ranks hold,
    and where a server rank stores this part.

    Attributes:
        box: int32 [n], row in `SharedBoxes`.
        tensor: int32 [n], row in `TensorTable`.
        lo, hi: int64 [n, DIMS], the part's first index and end in each dimension of the tensor.
        nbytes: int64 [n], bytes on the wire.
        parameter, offset, strides: where the server rank stores the part, see `BoxTable`.
        dtype: int8 [n], dtype of the parameter (`dtype_codes`).
    """

    box: Annotated[Array, "i4"]
    tensor: Annotated[Array, "i4"]
    lo: Annotated[Array, "i8", DIMS]
    hi: Annotated[Array, "i8", DIMS]
    nbytes: Annotated[Array, "i8"]
    parameter: Annotated[Array, "i4"]
    offset: Annotated[Array, "i8"]
    strides: Annotated[Array, "i8", DIMS]
    dtype: Annotated[Array, "i1"]


def share_boxes(storages: Sequence[RankStorage]) -> SharedBoxes:
    """Return the boxes (parts of tensors) that trainer ranks store, each once, with the ranks that hold it.

    Args:
        storages: how each trainer rank stores the model.
    """
    numbers: dict[int, int] = {}
    storage_of = np.array([numbers.setdefault(id(storage), len(numbers)) for storage in storages], np.int64)
    different = {number: storage for storage, number in zip(storages, storage_of.tolist(), strict=True)}
    tables = [different[number].boxes for number in range(len(different))]
    joined = BoxTable.joined(tables)
    dtype = np.concatenate(
        [dtype_codes(different[number].parameters.dtypes)[table.parameter] for number, table in enumerate(tables)]
    )
    storage = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    corners = np.concatenate([joined.lo, joined.hi], 1)
    order = np.lexsort((storage, *corners.T[::-1], joined.tensor))
    joined, storage, corners = joined.take(order), storage[order], corners[order]
    new = np.ones(len(order), bool)
    new[1:] = (joined.tensor[1:] != joined.tensor[:-1]) | (corners[1:] != corners[:-1]).any(1)
    box, first = np.cumsum(new) - 1, np.flatnonzero(new)
    members: list[list[int]] = [[] for _ in tables]
    for rank, number in enumerate(storage_of.tolist()):
        members[number].append(rank)
    sets, holders = _holder_sets(storage, first, members)
    return SharedBoxes(
        joined.tensor[first],
        joined.lo[first],
        joined.hi[first],
        holders,
        sets,
        storage_of,
        box * np.int64(len(tables)) + storage,
        joined.parameter,
        joined.offset,
        joined.strides,
        dtype[order],
    )


def _holder_sets(storage: Array, first: Array, members: list[list[int]]) -> tuple[tuple[tuple[int, ...], ...], Array]:
    """Return the different sets of ranks that hold a box (a part of a tensor), and the index of each box's set: int32
    [B].

    Args:
        storage: the storages that have each box; those of box b are `storage[first[b] : first[b + 1]]`.
        members: the ranks with each storage.
    """
    numbers: dict[bytes, int] = {}
    raw, width = np.ascontiguousarray(storage, np.int64).tobytes(), 8
    ends = [*first[1:].tolist(), len(storage)]
    holders = [
        numbers.setdefault(raw[start * width : end * width], len(numbers))
        for start, end in zip(first.tolist(), ends, strict=True)
    ]
    sets = tuple(
        tuple(sorted(rank for number in np.frombuffer(key, np.int64).tolist() for rank in members[number]))
        for key in numbers
    )
    return sets, np.array(holders, np.int32)


def needs_of(storage: RankStorage, shared: SharedBoxes, tensors: TensorTable, where: str) -> NeedTable:
    """Return which parts of the trainer's boxes a server rank with this storage needs.

    Args:
        where: name of server and rank, for messages.

    Raises:
        UserError: the trainer's ranks do not hold each element that the server rank needs exactly once.
    """
    boxes = storage.boxes.take(storage.boxes.rule != BoxRule.ZERO)
    starts = np.searchsorted(shared.tensor, np.arange(len(tensors) + 1))
    counts = (starts[1:] - starts[:-1])[boxes.tensor]
    row = np.repeat(np.arange(len(boxes)), counts)
    box = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + starts[boxes.tensor[row]]
    lo, hi = np.maximum(boxes.lo[row], shared.lo[box]), np.minimum(boxes.hi[row], shared.hi[box])
    meets = (hi > lo).all(1)
    row, box, lo, hi = row[meets], box[meets], lo[meets], hi[meets]
    numel = (hi - lo).prod(1)
    covered = np.bincount(row, numel, len(boxes)).astype(np.int64)
    if (covered != boxes.numel).any():
        bad = int((covered != boxes.numel).argmax())
        part = [list(span) for span in zip(boxes.lo[bad].tolist(), boxes.hi[bad].tolist(), strict=True)]
        raise UserError(
            f"{where}: parameter {storage.parameters.names[boxes.parameter[bad]]} needs elements {part} of "
            f"{tensors.names[boxes.tensor[bad]]}, but the trainer's ranks do not hold each of them exactly once",
            found=f"{covered[bad]} elements on the trainer's ranks",
            allowed=f"{boxes.numel[bad]} elements",
            fix=INSTEAD,
        )
    strides = boxes.strides[row]
    return NeedTable(
        box,
        boxes.tensor[row],
        lo,
        hi,
        numel * tensors.item_bytes[boxes.tensor[row]],
        boxes.parameter[row],
        boxes.offset[row] + ((lo - boxes.lo[row]) * strides).sum(1),
        strides,
        dtype_codes(storage.parameters.dtypes)[boxes.parameter[row]],
    )


def check_tiling(storage: RankStorage, where: str) -> None:
    """Check that the boxes (parts of tensors) of a rank cover every element of each parameter exactly once.

    Args:
        where: name of server and rank, for messages.

    Raises:
        UserError: an element of a parameter is in no box, or in several.
    """
    boxes, parameters = storage.boxes, storage.parameters
    numel = parameters.shapes.prod(1)
    covered = np.bincount(boxes.parameter, boxes.numel, len(parameters)).astype(np.int64)
    for bad in np.flatnonzero(covered != numel).tolist():
        raise _wrong_cover(storage, bad, where, f"its boxes have {covered[bad]} of {numel[bad]} elements")
    last = boxes.offset + ((boxes.hi - boxes.lo - 1) * boxes.strides).sum(1)
    if len(boxes) and ((boxes.offset < 0) | (last >= numel[boxes.parameter])).any():
        bad = int(boxes.parameter[((boxes.offset < 0) | (last >= numel[boxes.parameter])).argmax()])
        raise _wrong_cover(storage, bad, where, "a box reaches beyond its end")
    order = np.lexsort((boxes.offset, boxes.parameter))
    parameter, first, last = boxes.parameter[order], boxes.offset[order], last[order]
    meeting = (parameter[1:] == parameter[:-1]) & (first[1:] <= last[:-1])
    dense = last - first + 1 == boxes.numel[order]
    unusual = np.union1d(parameter[1:][meeting], parameter[~dense])
    for number in unusual.tolist():
        if not _disjoint(storage, number):
            raise _wrong_cover(storage, number, where, "two of its boxes overlap")


def _wrong_cover(storage: RankStorage, number: int, where: str, why: str) -> UserError:
    name, shape = storage.parameters.names[number], storage.parameters.shapes[number].tolist()
    return UserError(
        f"{where}: an update would not write each element of the parameter {name} {shape} exactly once",
        found=why,
        fix=INSTEAD,
    )


def _disjoint(storage: RankStorage, number: int) -> bool:
    """Return whether no two boxes (parts of tensors) overlap in the parameter `number`."""
    boxes = storage.boxes.take(storage.boxes.parameter == number)
    shape = storage.parameters.shapes[number]
    size = boxes.hi - boxes.lo
    steps = row_major(shape[None])[0]
    # along[b, i, j]: whether dimension i of box b lies along dimension j of the parameter
    along = (boxes.strides[:, :, None] == steps) & (steps > 0) & (size > 1)[:, :, None]
    if (along.sum(2) != (size > 1)).any():
        return _disjoint_elements(boxes.offset, size, boxes.strides, int(shape.prod()))
    start = boxes.offset[:, None] // np.maximum(steps, 1) % np.maximum(shape, 1)
    start = np.where(steps > 0, start, 0)
    end = start + 1 + (along * (size - 1)[:, :, None]).sum(1)
    if (end > shape).any():
        return _disjoint_elements(boxes.offset, size, boxes.strides, int(shape.prod()))
    order = np.argsort(boxes.offset, kind="stable")
    start, end = start[order], end[order]
    for row in range(len(order) - 1):
        if ((start[row + 1 :] < end[row]) & (start[row] < end[row + 1 :])).all(1).any():
            return False
    return True


def _disjoint_elements(offset: Array, size: Array, strides: Array, numel: int) -> bool:
    """Return whether no element of a parameter is in two boxes (parts of tensors), by counting the boxes of each
    element. A parameter of more than `_COUNTED` elements is not checked: False."""
    if numel > _COUNTED:
        return False
    counts = np.zeros(numel, np.int32)
    for row in range(len(offset)):
        index = offset[row]
        for dim in range(DIMS):
            index = np.add.outer(index, np.arange(size[row, dim]) * strides[row, dim])
        np.add.at(counts, np.ravel(index), 1)
    return bool((counts <= 1).all())
