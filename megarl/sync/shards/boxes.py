"""How ranks store a model: which box (rectangular part) of which Hugging Face tensor lies where in which parameter.

Each rank of the trainer and of a server is described by a `RankStorage`. Those of the trainer's ranks are computed from
its weight table (`sources.py`), and each server rank describes itself.

A tensor has exactly `DIMS` dimensions here (`padded_shape`). If it has fewer, dimensions of size 1 are added at the
end; if it has more, the last dimensions, which no layout splits, are merged. A box is [lo, hi) in each dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import numpy as np

from megarl.sync.shards.table import Array, ColumnTable, TableSet

DIMS = 3
#: Bytes of an element by the name of its torch dtype.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class BoxRule(IntEnum):
    """How a box (a rectangular part of a tensor) in a parameter gets its values.

    COPY: from the same box of the tensor, cast to the parameter's dtype.
    ZERO: always zero, such as padding rows of an embedding. The box belongs to no tensor (`tensor` is -1), and nothing
        is sent.
    """

    COPY = 0
    ZERO = 1


@dataclass(frozen=True, eq=False)
class TensorTable(ColumnTable):
    """The tensors that can be sent, in the trainer's export order; other tables refer to a tensor by its row here.

    The trainer sends this table to the servers, whose ranks use it to describe how they store the tensors.

    Attributes:
        names: str [T], Hugging Face names.
        shapes: int64 [T, DIMS], see `padded_shape`.
        dtypes: str [T], dtypes on the wire, such as `bfloat16`.
    """

    names: Annotated[Array, "str"]
    shapes: Annotated[Array, "i8", DIMS]
    dtypes: Annotated[Array, "str"]

    @property
    def item_bytes(self) -> Array:
        """Bytes of an element of each tensor as it is sent: int64 [T]."""
        return item_bytes(self.dtypes)


@dataclass(frozen=True, eq=False)
class ParameterTable(ColumnTable):
    """The parameters of one rank; other tables refer to a parameter by its row here.

    Attributes:
        names: str [P]: on a server as in `named_parameters`; on the trainer `CHUNK/NAME`.
        shapes: int64 [P, DIMS], see `padded_shape`.
        dtypes: str [P], such as `bfloat16`.
    """

    names: Annotated[Array, "str"]
    shapes: Annotated[Array, "i8", DIMS]
    dtypes: Annotated[Array, "str"]


@dataclass(frozen=True, eq=False)
class BoxTable(ColumnTable):
    """Boxes (rectangular parts) of tensors, and where each lies in the parameters of one rank.

    Element (i, j, k) of a box, counted from `lo`, is the element `offset + i * strides[0] + j * strides[1] + k *
    strides[2]` of the parameter, counted in its memory from its first element.

    Attributes:
        tensor: int32 [n], row of the tensor in `TensorTable`; -1 with `BoxRule.ZERO`.
        lo: int64 [n, DIMS], first index in each dimension of the tensor; 0 with `BoxRule.ZERO`.
        hi: int64 [n, DIMS], index after the last one.
        parameter: int32 [n], row of the parameter in `ParameterTable`.
        offset: int64 [n], elements.
        strides: int64 [n, DIMS], elements; 0 in dimensions of size 1.
        rule: int8 [n], a `BoxRule`.
    """

    tensor: Annotated[Array, "i4"]
    lo: Annotated[Array, "i8", DIMS]
    hi: Annotated[Array, "i8", DIMS]
    parameter: Annotated[Array, "i4"]
    offset: Annotated[Array, "i8"]
    strides: Annotated[Array, "i8", DIMS]
    rule: Annotated[Array, "i1"]

    @property
    def numel(self) -> Array:
        """Number of elements of each box (part of a tensor): int64 [n]."""
        return (self.hi - self.lo).prod(1)


@dataclass(frozen=True, eq=False)
class RankStorage(TableSet):
    """All parameters of one rank that an update writes or reads, and the boxes (parts of tensors) that fill them.

    Ranks of servers whose storages have equal digests are planned once.

    Raises:
        ValueError: a box refers to a parameter that is not listed, or has an unknown rule.
    """

    parameters: ParameterTable
    boxes: BoxTable

    def __post_init__(self) -> None:
        parameters, boxes = self.parameters, self.boxes
        if len(boxes) and not 0 <= boxes.parameter.min() <= boxes.parameter.max() < len(parameters):
            rows = f"{boxes.parameter.min()} to {boxes.parameter.max()}"
            raise ValueError(f"boxes.parameter of a rank's storage has {rows}; allowed: 0 to {len(parameters) - 1}")
        if not np.isin(boxes.rule, [rule.value for rule in BoxRule]).all():
            rules = sorted(set(boxes.rule.tolist()))
            raise ValueError(f"boxes.rule of a rank's storage has an unknown rule: {rules}; allowed: {list(BoxRule)}")


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """Where a rank runs: its machine, and the number of its GPU there (without GPUs: of its process).

    Ranks with the same GPU number are on the same rail of the network.
    """

    machine: str
    gpu: int


@dataclass(frozen=True, eq=False)
class ServerStorage:
    """One server: how each of its ranks stores the model, and where the ranks run.

    Servers of the same layout share the `RankStorage` objects, which makes planning them cheap.
    """

    ranks: tuple[RankStorage, ...]
    places: tuple[GpuPlace, ...]


def padded_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape of `DIMS` dimensions: sizes of 1 are appended, or the last dimensions merged into one."""
    if len(shape) <= DIMS:
        return (*shape, *(1,) * (DIMS - len(shape)))
    return (*shape[: DIMS - 1], math.prod(shape[DIMS - 1 :]))


def item_bytes(dtypes: Iterable[str]) -> Array:
    """Return the bytes of an element of each dtype: int64 [n].

    Raises:
        ValueError: a dtype that is never sent.
    """
    kinds, which = np.unique(np.asarray(dtypes, np.str_), return_inverse=True)
    unknown = sorted(set(kinds.tolist()) - ITEM_BYTES.keys())
    if unknown:
        raise ValueError(f"weights of dtype {', '.join(unknown)} cannot be sent; allowed: {', '.join(ITEM_BYTES)}")
    return np.array([ITEM_BYTES[kind] for kind in kinds.tolist()], np.int64)[which]


def dtype_codes(dtypes: Array) -> Array:
    """Return the index of each dtype in `ITEM_BYTES`, or -1 for a dtype that is never sent: int8 [n]."""
    kinds, which = np.unique(dtypes, return_inverse=True)
    known = list(ITEM_BYTES)
    return np.array([known.index(kind) if kind in known else -1 for kind in kinds.tolist()], np.int8)[which]


def row_major(shapes: Array) -> Array:
    """Return the strides of contiguous tensors in elements: int64 [n, DIMS] for shapes int64 [n, DIMS]; 0 in dimensions
    of size 1."""
    after = np.cumprod(np.concatenate([shapes[:, 1:], np.ones_like(shapes[:, :1])], 1)[:, ::-1], 1)[:, ::-1]
    return np.where(shapes > 1, after, 0)
