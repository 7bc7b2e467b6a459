"""Write Hugging Face tensors, or some elements of them, into the parameters of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.models.hf import encoder_of
from megarl.models.layers.rules import Piece, TensorRegion
from megarl.models.policy import PolicyModel
from megarl.models.weight_table import Coordinate, Shard, WeightTable, as_index, region_numel
from megarl.models.weights.files import CheckpointReader
from megarl.models.weights.fill import local_shards

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig


def held_slices(hf: PretrainedConfig, at: Coordinate) -> dict[str, list[TensorRegion]]:
    """Return the regions of each tensor that the process with coordinate `at` holds. A region that several parameters
    hold, such as tied embeddings, appears several times."""
    regions: dict[str, list[TensorRegion]] = {}
    for shard in WeightTable.of(hf).shards(at):
        for piece in shard.pieces:
            regions.setdefault(piece.source, []).append(piece.source_region)
    return regions


def part_name(tensor: str, region: TensorRegion, number: int) -> str:
    """Name a region of a tensor in messages; `number` distinguishes the regions of this tensor that a process holds.

    >>> part_name("norm.weight", ((0, 4),), 0)
    'norm.weight[0:4], part 0'
    """
    spans = ",".join(f"{start}:{stop}" for start, stop in region)
    return f"{tensor}[{spans}], part {number}"


class WeightWriter:
    """Writes Hugging Face tensors into this process's parameters.

    Rows that no tensor fills (vocabulary padding) become zero.

    Attributes:
        shapes: shapes of all tensors of the model.
        held: names of the tensors that this process holds at least a part of.
    """

    def __init__(self, chunks: Sequence[PolicyModel]) -> None:
        self.shapes = chunks[0].weight_table.shapes()
        self._places: dict[str, list[tuple[Piece, Tensor]]] = {}
        self._sees = encoder_of(chunks[0].hf_config) is not None
        for shard, param in local_shards(chunks):
            _clear_padding(shard, param)
            for piece in shard.pieces:
                self._places.setdefault(piece.source, []).append((piece, param))
        self.held = frozenset(self._places)

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        """Copy this process's parts of a whole tensor, cast to the parameters' dtype."""
        self._check(name, tuple(tensor.shape))
        for piece, param in self._places.get(name, ()):
            param[as_index(piece.target_region)].copy_(tensor[as_index(piece.source_region)])

    @torch.no_grad()
    def write_elements(self, name: str, shape: tuple[int, ...], positions: Tensor, values: Tensor) -> None:
        """Copy some elements of a tensor, cast to the parameters' dtype.

        Args:
            positions: int64 [n], indices into the flattened tensor.
            values: [n].
        """
        self._check(name, shape)
        at = torch.unravel_index(positions, shape)
        for piece, param in self._places.get(name, ()):
            inside = torch.ones_like(positions, dtype=torch.bool)
            for index, (start, stop) in zip(at, piece.source_region, strict=True):
                inside &= (index >= start) & (index < stop)
            offsets = [
                to - source for (source, _), (to, _) in zip(piece.source_region, piece.target_region, strict=True)
            ]
            where = tuple(index[inside] + offset for index, offset in zip(at, offsets, strict=True))
            param[where] = values[inside].to(param.dtype)

    @torch.no_grad()
    def read_folder(self, folder: Path) -> None:
        """Copy this process's parts of the tensors in safetensors files."""
        reader = CheckpointReader(folder, vision=self._sees)
        for name, places in self._places.items():
            for piece, param in places:
                param[as_index(piece.target_region)].copy_(reader.read(name, piece.source_region))

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (`part_name`, values) of every part that this process holds."""
        for name, places in self._places.items():
            for number, (piece, param) in enumerate(places):
                yield part_name(name, piece.source_region, number), param.detach()[as_index(piece.target_region)]

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.shapes:
            raise ValueError(f"the model has no tensor {name!r}; send the tensors of the engine's model only")
        if self.shapes[name] != shape:
            raise ValueError(f"tensor {name!r} has shape {shape}, but the model needs {self.shapes[name]}")


@torch.no_grad()
def _clear_padding(shard: Shard, param: Tensor) -> None:
    if sum(region_numel(piece.target_region) for piece in shard.pieces) == param.numel():
        return
    padding = torch.ones_like(param, dtype=torch.bool)
    for piece in shard.pieces:
        padding[as_index(piece.target_region)] = False
    param.masked_fill_(padding, 0)
