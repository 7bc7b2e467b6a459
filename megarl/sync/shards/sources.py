"""How the trainer's ranks store a model, from its weight table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from megarl.models.layers.rules import TensorRegion
from megarl.models.weight_table import Coordinate, WeightTable
from megarl.sync.plan import wire_tensors
from megarl.sync.shards.boxes import (
    DIMS,
    BoxTable,
    ParameterTable,
    RankStorage,
    TensorTable,
    padded_shape,
    row_major,
)


def tensors_of(weights: WeightTable, dtype: str = "bfloat16") -> TensorTable:
    """Return the tensors that updates of this model send, in export order.

    Args:
        dtype: dtype on the wire; tensors that are float32 in every model are sent in float32.
    """
    float32 = weights.float32()
    entries = [
        entry
        for name, shape in weights.shapes().items()
        for entry in wire_tensors(name, shape, "float32" if name in float32 else dtype, fp8=False)
    ]
    return TensorTable(
        np.array([entry.name for entry in entries], np.str_),
        np.array([padded_shape(entry.shape) for entry in entries], np.int64).reshape(-1, DIMS),
        np.array([entry.dtype for entry in entries], np.str_),
    )


def trainer_storages(
    weights: WeightTable, ranks: Sequence[Coordinate], tensors: TensorTable, dtype: str = "bfloat16"
) -> list[RankStorage]:
    """Return how each trainer rank stores the model. Ranks with the same coordinate in the layout share one object.

    Args:
        dtype: dtype of the trainer's parameters.
    """
    rows = {name: row for row, name in enumerate(tensors.names.tolist())}
    dtypes = dict.fromkeys(rows, dtype) | dict.fromkeys(weights.float32(), "float32")
    storages: dict[Coordinate, RankStorage] = {}
    for at in ranks:
        if at not in storages:
            storages[at] = _rank_storage(weights, at, rows, dtypes)
    return [storages[at] for at in ranks]


def _rank_storage(
    weights: WeightTable, at: Coordinate, rows: Mapping[str, int], dtypes: Mapping[str, str]
) -> RankStorage:
    """Return how the rank with coordinate `at` stores the model.

    Args:
        rows: row in `TensorTable` by name.
        dtypes: dtype of the parameter that a tensor is stored in, by the tensor's name.
    """
    shards = weights.shards(at)
    shapes = np.array([padded_shape(shard.shape) for shard in shards], np.int64).reshape(-1, DIMS)
    pairs: list[tuple[int, int]] = []
    spans: list[TensorRegion] = []
    for number, shard in enumerate(shards):
        for piece in shard.pieces:
            row = rows.get(piece.source)
            if row is not None:
                pairs.append((row, number))
                spans.append((*_padded(piece.source_region), *_padded(piece.target_region)))
    tensor, parameter = np.array(pairs, np.int64).reshape(-1, 2).T
    region = np.array(spans, np.int64).reshape(-1, 2, DIMS, 2)
    strides = row_major(shapes)[parameter]
    size = region[:, 0, :, 1] - region[:, 0, :, 0]
    boxes = BoxTable(
        tensor=tensor,
        lo=region[:, 0, :, 0],
        hi=region[:, 0, :, 1],
        parameter=parameter,
        offset=(region[:, 1, :, 0] * strides).sum(1),
        strides=np.where(size > 1, strides, 0),
        rule=np.zeros(len(pairs), np.int8),
    )
    boxes = boxes.take(boxes.numel > 0)
    parameters = ParameterTable(
        np.array([f"{shard.chunk}/{shard.param}" for shard in shards], np.str_),
        shapes,
        np.array([dtypes.get(shard.pieces[0].source, "") if shard.pieces else "" for shard in shards], np.str_),
    )
    return RankStorage(parameters, boxes)


def _padded(region: TensorRegion) -> TensorRegion:
    """Return a region with `DIMS` dimensions: (0, 1) is appended, or dimensions too many are merged into the last."""
    if len(region) <= DIMS:
        return (*region, *((0, 1),) * (DIMS - len(region)))
    return (*region[: DIMS - 1], (0, math.prod(stop - start for start, stop in region[DIMS - 1 :])))
