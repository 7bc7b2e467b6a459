"""Cuts a sequence of boxes (rectangular parts of tensors) at given bytes, between two boxes or two rows of a box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from megarl.sync.shards.table import Array, ColumnTable


@dataclass(frozen=True, eq=False)
class PartTable(ColumnTable):
    """Rows [first, last) of boxes (parts of tensors) along the box's first dimension with more than one element.

    Attributes:
        row: int32 [n], row of the box in `WireTable`.
        first, last: int64 [n].
        nbytes: int64 [n], bytes on the wire.
    """

    row: Annotated[Array, "i4"]
    first: Annotated[Array, "i8"]
    last: Annotated[Array, "i8"]
    nbytes: Annotated[Array, "i8"]


def cut_parts(parts: PartTable, ends: Array, least: int) -> tuple[PartTable, Array]:
    """Cut a sequence of parts of boxes, seen as one range of bytes, near the positions `ends`.

    A cut inside a part moves to the nearest row of the part, or to its nearest end if one of the two pieces would have
    fewer than `least` bytes.

    Args:
        ends: int64 [k], ascending, the bytes at which the ranges 0 .. k - 1 end; the last one is the sum of all bytes.

    Returns:
        The pieces in order, and for each piece the number of its range: int64 [m], 0 .. k - 1.
    """
    starts = np.cumsum(parts.nbytes) - parts.nbytes
    total = int(parts.nbytes.sum())
    rows = parts.last - parts.first
    wanted = ends[:-1]
    at = np.clip(np.searchsorted(starts, wanted, side="right") - 1, 0, None)
    inside = wanted - starts[at]
    size = parts.nbytes[at]
    per_row = size // np.maximum(rows[at], 1)
    row = np.rint(inside / np.maximum(per_row, 1)).astype(np.int64)
    row = np.minimum(row, rows[at])
    row = np.where((row * per_row < least) & (row < rows[at]), 0, row)
    row = np.where((size - row * per_row < least) & (row > 0), rows[at], row)
    small = size < 2 * least
    row = np.where(small, np.where(inside * 2 >= size, rows[at], 0), row)
    cuts = np.minimum(np.maximum.accumulate(starts[at] + row * per_row), total)
    points = np.sort(np.concatenate([starts, cuts]), kind="stable")
    points = points[(np.diff(points, prepend=-1) > 0) & (points < total)]
    owner = np.searchsorted(starts, points, side="right") - 1
    until = np.append(points[1:], total)
    row_bytes = parts.nbytes[owner] // rows[owner]
    first = parts.first[owner] + (points - starts[owner]) // row_bytes
    pieces = PartTable(parts.row[owner], first, first + (until - points) // row_bytes, until - points)
    return pieces, np.searchsorted(cuts, points, side="right")
