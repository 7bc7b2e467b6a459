"""Gather a sharded model into Hugging Face tensors, one at a time, and write them to a folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.comm import WorkerGroup
from megarl.models.policy import PolicyModel
from megarl.models.weights.files import FolderWriter
from megarl.models.weights.fill import coordinate, local_shards
from megarl.models.weights.metadata import write_metadata
from megarl.models.weights.plan import Box, Coordinate, Piece, hf_tensors, slices_for
from megarl.tracing import beat

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_WRITER = 0


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


def layout_of_all(mine: Coordinate, world: WorkerGroup) -> list[Coordinate]:
    """Return the coordinates of all ranks of `world`, by rank. Collective."""
    values = torch.tensor(dataclasses.astuple(mine), dtype=torch.int64)
    return [Coordinate(*row.tolist()) for row in world.all_gather(values)]


def _owners(
    hf: PretrainedConfig, layout: list[Coordinate], value_head: bool
) -> dict[str, dict[int, list[tuple[tuple[int, str], Piece]]]]:
    """Map each Hugging Face tensor to the ranks that give its pieces of parameters. Each box is given once."""
    table: dict[str, dict[int, list[tuple[tuple[int, str], Piece]]]] = {}
    given: set[tuple[str, Box]] = set()
    seen: set[Coordinate] = set()
    for rank, at in enumerate(layout):
        if at in seen:
            continue
        seen.add(at)
        for shard in slices_for(hf, at, value_head=value_head):
            for piece in shard.pieces:
                if (piece.source, piece.source_box) not in given:
                    given.add((piece.source, piece.source_box))
                    table.setdefault(piece.source, {}).setdefault(rank, []).append(((shard.chunk, shard.param), piece))
    return table


@torch.no_grad()
def iter_hf_tensors(chunks: Sequence[PolicyModel], world: WorkerGroup) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every Hugging Face tensor in export order: the whole CPU tensor on rank 0 of `world`, None elsewhere.

    Collective over `world`, all ranks that hold the model; one tensor is in flight at a time. Values are exactly the
    parameters'.
    """
    hf, value_head = chunks[0].hf_config, chunks[0].has_value_head
    params = {(shard.chunk, shard.param): param for shard, param in local_shards(chunks)}
    owners = _owners(hf, layout_of_all(coordinate(chunks), world), value_head)
    dtype = chunks[0].config.params_dtype
    for name, shape in hf_tensors(hf, value_head=value_head).items():
        beat()
        whole = torch.empty(shape, dtype=dtype) if world.rank == _WRITER else None
        for rank, pieces in owners[name].items():
            if rank == world.rank:
                parts = [params[key][_slices(piece.target_box)].cpu() for key, piece in pieces]
                if whole is None:
                    world.send(torch.cat([part.flatten() for part in parts]), dst=_WRITER)
            elif whole is not None:
                parts = _receive(rank, pieces, dtype, world)
            if whole is not None:
                for (_, piece), part in zip(pieces, parts, strict=True):
                    whole[_slices(piece.source_box)] = part
        yield name, whole


def _receive(
    rank: int, pieces: list[tuple[tuple[int, str], Piece]], dtype: torch.dtype, world: WorkerGroup
) -> list[torch.Tensor]:
    shapes = [tuple(stop - start for start, stop in piece.source_box) for _, piece in pieces]
    buffer = torch.empty(sum(math.prod(shape) for shape in shapes), dtype=dtype)
    parts = world.receive(buffer, src=rank).split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def export_weights(
    chunks: Sequence[PolicyModel],
    out_dir: str | Path,
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    world: WorkerGroup,
    dtype: torch.dtype | None = None,
    max_shard_gb: float = 4.0,
    source: str | Path | None = None,
) -> None:
    """Write the model as a Hugging Face folder that `from_pretrained` loads. Collective over `world`.

    The folder appears under its name when it is complete; one that was there is replaced.

    Args:
        world: all ranks that hold the model; its first one writes.
        dtype: dtype of the written tensors; None: as the parameters are.
        max_shard_gb: start another file beyond this size (10**9 bytes).
        source: the model that this one was trained from; see `write_metadata`.
    """
    out_dir = Path(out_dir)
    dtype = dtype or chunks[0].config.params_dtype
    value_head = chunks[0].has_value_head
    if world.rank != _WRITER:
        for _ in iter_hf_tensors(chunks, world):
            pass
    else:
        shapes = hf_tensors(hf_config, value_head=value_head)
        with FolderWriter(out_dir, shapes, dtype, int(max_shard_gb * 1e9)) as writer:
            for name, tensor in iter_hf_tensors(chunks, world):
                assert tensor is not None, "the writing rank is given every tensor"
                writer.add(name, tensor)
            write_metadata(writer.temporary, hf_config, tokenizer, dtype, value_head=value_head, source=source)
    world.barrier()
