"""Gather a sharded model into Hugging Face tensors, one at a time, and write them to a folder."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.config.model import LoraConfig
from megarl.models.hf import stacks_experts
from megarl.models.layers.rules import Piece, TensorRegion
from megarl.models.policy import PolicyModel
from megarl.models.weight_table import Coordinate, Shard, as_index, region_numel, region_shape
from megarl.models.weights.adapters import adapter_slices, adapter_tensors
from megarl.models.weights.draft import find_draft, repeated_tensors
from megarl.models.weights.files import FolderWriter
from megarl.models.weights.fill import Reader, coordinate, read_region, weight_readers
from megarl.models.weights.metadata import write_draft_layers, write_metadata
from megarl.system.comm import WorkerGroup
from megarl.system.tracing import beat

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_WRITER = 0


def layout_of_all(mine: Coordinate, world: WorkerGroup) -> list[Coordinate]:
    """Return the coordinates of all ranks of `world`, by rank. Collective."""
    values = torch.tensor(dataclasses.astuple(mine), dtype=torch.int64)
    return [Coordinate(*row.tolist()) for row in world.all_gather(values)]


def tensor_dtypes(chunks: Sequence[PolicyModel], dtype: torch.dtype | None = None) -> dict[str, torch.dtype]:
    """Return the dtype of every Hugging Face tensor of a model in `dtype`; None: in the dtype of its parameters."""
    table, dtype = chunks[0].weight_table, dtype or chunks[0].config.params_dtype
    return dict.fromkeys(table.shapes(), dtype) | dict.fromkeys(table.float32(), torch.float32)


_Key = tuple[int, str]  # number of the chunk, name of the parameter


def _owners(
    layout: list[Coordinate], slices: Callable[[Coordinate], list[Shard]]
) -> dict[str, dict[int, list[tuple[_Key, Piece]]]]:
    """Map each tensor to the ranks that send its pieces, so that each region is sent once."""
    table: dict[str, dict[int, list[tuple[_Key, Piece]]]] = {}
    given: set[tuple[str, TensorRegion]] = set()
    for at in dict.fromkeys(layout):
        rank = layout.index(at)
        for shard in slices(at):
            for piece in shard.pieces:
                if (piece.source, piece.source_region) not in given:
                    given.add((piece.source, piece.source_region))
                    table.setdefault(piece.source, {}).setdefault(rank, []).append(((shard.chunk, shard.param), piece))
    return table


def _sources(
    chunks: Sequence[PolicyModel], world: WorkerGroup
) -> tuple[dict[str, tuple[int, ...]], dict[str, dict[int, list[tuple[_Key, Piece]]]], dict[_Key, Reader]]:
    """Return the tensors' shapes, which ranks send their pieces, and readers of this rank's parameters. Collective."""
    table = chunks[0].weight_table
    owners = _owners(layout_of_all(coordinate(chunks), world), table.shards)
    read = {(shard.chunk, shard.param): reader for shard, reader in weight_readers(chunks)}
    return table.shapes(), owners, read


@torch.no_grad()
def iter_hf_tensors(chunks: Sequence[PolicyModel], world: WorkerGroup) -> Iterator[tuple[str, Tensor | None]]:
    """Yield every Hugging Face tensor in export order: the whole CPU tensor on rank 0 of `world`, None elsewhere.

    Collective over `world`, all ranks that hold the model; one tensor at a time is gathered. Values are exactly those
    of the parameters, with adapters merged in.
    """
    yield from _gathered(*_sources(chunks, world), tensor_dtypes(chunks), world)


@torch.no_grad()
def iter_adapter_tensors(
    chunks: Sequence[PolicyModel], lora: LoraConfig, world: WorkerGroup
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield every adapter tensor (`adapter_tensors`), gathered as by `iter_hf_tensors`."""
    hf = chunks[0].hf_config
    params = {(i, name): p.detach() for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
    here = coordinate(chunks)
    read: dict[_Key, Reader] = {
        (shard.chunk, shard.param): functools.partial(read_region, params[shard.chunk, shard.param], None)
        for shard in adapter_slices(hf, here, lora)
    }
    owners = _owners(layout_of_all(here, world), lambda at: adapter_slices(hf, at, lora))
    shapes = adapter_tensors(hf, lora)
    dtypes = dict.fromkeys(shapes, chunks[0].config.params_dtype)
    yield from _gathered(shapes, owners, read, dtypes, world)


def _gathered(
    shapes: dict[str, tuple[int, ...]],
    owners: dict[str, dict[int, list[tuple[_Key, Piece]]]],
    read: dict[_Key, Reader],
    dtypes: Mapping[str, torch.dtype],
    world: WorkerGroup,
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the tensors of `shapes`, gathered from their owners on rank 0; `read` reads this rank's parameters."""
    for name, shape in shapes.items():
        beat()
        dtype = dtypes[name]
        whole = torch.empty(shape, dtype=dtype) if world.rank == _WRITER else None
        for rank, pieces in owners[name].items():
            if rank == world.rank:
                parts = [read[key](piece.target_region).cpu() for key, piece in pieces]
                if whole is None:
                    world.send(torch.cat([part.flatten() for part in parts]), dst=_WRITER)
            elif whole is not None:
                part_shapes = [region_shape(piece.source_region) for _, piece in pieces]
                flat = world.receive(torch.empty(sum(map(math.prod, part_shapes)), dtype=dtype), src=rank)
                flat_parts = flat.split([math.prod(part_shape) for part_shape in part_shapes])
                parts = [part.view(size) for part, size in zip(flat_parts, part_shapes, strict=True)]
            if whole is not None:
                for (_, piece), part in zip(pieces, parts, strict=True):
                    whole[as_index(piece.source_region)] = part
        yield name, whole


@torch.no_grad()
def iter_on_all_ranks(
    chunks: Sequence[PolicyModel], world: WorkerGroup, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor in export order, whole, on `device` of every rank; it may share a parameter's
    memory.

    Collective over `world`, all ranks that hold the model. Broadcasts do not open a connection for each pair of ranks,
    as messages to one rank would. One tensor at a time is gathered. Values are exactly those of the parameters, with
    adapters merged in.

    Args:
        device: device of the parameters, or the CPU.
    """
    shapes, owners, read = _sources(chunks, world)
    dtypes = tensor_dtypes(chunks)
    for name, shape in shapes.items():
        beat()
        dtype = dtypes[name]
        whole: Tensor | None = None
        for rank, pieces in owners[name].items():
            sizes = [region_numel(piece.source_region) for _, piece in pieces]
            if rank == world.rank:
                local = [read[key](piece.target_region).to(device) for key, piece in pieces]
                flat = torch.cat([x.flatten() for x in local]) if len(local) > 1 else local[0].contiguous().view(-1)
            else:
                flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            world.broadcast(flat, src=rank)
            if sizes == [math.prod(shape)]:
                whole = flat.view(shape)
                break
            whole = torch.empty(shape, dtype=dtype, device=device) if whole is None else whole
            for (_, piece), part in zip(pieces, flat.split(sizes), strict=True):
                target = whole[as_index(piece.source_region)]
                target.copy_(part.view(target.shape))
        assert whole is not None, f"no rank holds {name}"
        yield name, whole


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
    keep_draft: bool = False,
    classifies: bool = False,
) -> None:
    """Write the model as a Hugging Face folder that `from_pretrained` loads. Collective over `world`.

    The folder appears under its name when it is complete; an existing folder is replaced.

    Args:
        world: all ranks that hold the model; its first one writes.
        dtype: dtype of the written tensors, except those that are float32 in every model; None: the parameters'
            dtype.
        max_shard_gb: largest size of a file (10**9 bytes).
        source: folder or hub name of the model that this one was trained from; its generation_config.json is copied.
        keep_draft: also write the draft head of `source` if it has one. A critic has none.
        classifies: the value head scores whole sequences, not tokens.
    """
    out_dir = Path(out_dir)
    dtype = dtype or chunks[0].config.params_dtype
    value_head = chunks[0].has_value_head
    if world.rank != _WRITER:
        for _ in iter_hf_tensors(chunks, world):
            pass
    else:
        shapes, dtypes = chunks[0].weight_table.shapes(), tensor_dtypes(chunks, dtype)
        trained = chunks[0].weight_table.has_draft
        repeats = repeated_tensors(hf_config, source) if trained else {}
        written = {name: (name, *repeats.get(name, ())) for name in shapes}  # a repetition follows its original
        dtypes = {copy: dtypes[name] for name, copies in written.items() for copy in copies}
        shapes = {copy: shapes[name] for name, copies in written.items() for copy in copies}
        draft = find_draft(hf_config, source) if keep_draft and not value_head and not trained else None
        if draft is not None:
            shapes, dtypes = shapes | draft.shapes(), dtypes | draft.dtypes(dtype)
            print(draft.describe(), flush=True)
        with FolderWriter(
            out_dir, shapes, dtypes, int(max_shard_gb * 1e9), stacked=stacks_experts(hf_config)
        ) as writer:
            for name, tensor in iter_hf_tensors(chunks, world):
                assert tensor is not None, "the writing rank gets every tensor"
                for copy in written[name]:
                    writer.add(copy, tensor)
            for name, tensor in () if draft is None else draft.tensors():
                beat()
                writer.add(name, tensor)
            heads = {"value_head": value_head, "classifies": classifies}
            write_metadata(writer.temporary, hf_config, tokenizer, dtype, **heads, source=source)
            write_draft_layers(writer.temporary, hf_config, 1 if trained else 0 if draft is None else draft.layers)
    world.barrier()
