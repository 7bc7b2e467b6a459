"""Gather a sharded model into Hugging Face tensors, one at a time, and write them to a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
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
from megarl.models.weights.draft import KeptDraft, find_draft, repeated_tensors
from megarl.models.weights.files import FolderWriter
from megarl.models.weights.fill import Reader, coordinate, read_region, weight_readers
from megarl.models.weights.metadata import write_draft_layers, write_metadata
from megarl.system.comm import WorkerGroup
from megarl.system.errors import WorkerError
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
    to: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, tensor) for each tensor of `shapes`: on one rank the whole tensor, gathered from its owners, and on
    all other ranks None.

    Args:
        owners: by tensor, the ranks that send its pieces, and their pieces.
        read: functions that read this rank's parameters.
        to: by tensor, the rank that gets it; None: rank 0 gets all.
    """
    for name, shape in shapes.items():
        beat()
        dtype, target = dtypes[name], _WRITER if to is None else to[name]
        whole = torch.empty(shape, dtype=dtype) if world.rank == target else None
        for rank, pieces in owners[name].items():
            if rank == world.rank:
                parts = [read[key](piece.target_region).cpu() for key, piece in pieces]
                if whole is None:
                    world.send(torch.cat([part.flatten() for part in parts]), dst=target)
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
    """Yield (name, tensor) for each Hugging Face tensor of the model in export order: the whole tensor, on every rank.

    Collective over `world`. One tensor at a time is broadcast, which needs no connection for each pair of ranks. Values
    are exactly those of the parameters, with adapters merged in; a tensor may share a parameter's memory.

    Args:
        world: all ranks of the model; or the ranks of one pipeline stage (`stage_group`), to yield only its tensors.
        device: where the yielded tensors are: the device of the parameters, or the CPU.
    """
    shapes, owners, read = _sources(chunks, world)
    dtypes = tensor_dtypes(chunks)
    for name, shape in shapes.items():
        if name not in owners:
            continue
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


@contextlib.contextmanager
def stage_group(chunks: Sequence[PolicyModel], world: WorkerGroup) -> Iterator[WorkerGroup]:
    """Inside the block, provide the group of all ranks with the same pipeline stage as this rank.

    The group is `world` itself if there is one stage, or if a tensor is spread over several stages: each group can
    gather all its tensors. Collective over `world` at the beginning and at the end of the block.
    """
    layout = layout_of_all(coordinate(chunks), world)
    stages = sorted({at.pp_rank for at in layout})
    owners = _owners(layout, chunks[0].weight_table.shards).values()
    if len(stages) == 1 or any(len({layout[rank].pp_rank for rank in ranks}) > 1 for ranks in owners):
        yield world
        return
    members = [[world.ranks[rank] for rank, at in enumerate(layout) if at.pp_rank == stage] for stage in stages]
    groups = [world.subgroup(ranks, f"pipeline stage {stage}") for stage, ranks in zip(stages, members, strict=True)]
    [stage] = [group for group in groups if group is not None]
    try:
        yield stage
        world.barrier()  # without an error, close the group after all ranks have used it
    finally:
        stage.close()


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
        world: all ranks of the model. Several ranks write tensor files, and the first rank all other files, so
            `out_dir` must be on a file system that all ranks share.
        dtype: dtype of the written tensors, except those that are float32 in every model; None: the parameters'
            dtype.
        max_shard_gb: largest size of a file (10**9 bytes).
        source: folder or hub name of the model that this one was trained from; its generation_config.json is copied.
        keep_draft: also write the draft head of `source` if it has one. A critic has none.
        classifies: the value head scores whole sequences, not tokens.
    """
    dtype = dtype or chunks[0].config.params_dtype
    heads = {"value_head": chunks[0].has_value_head, "classifies": classifies}
    content = _Content.of(chunks, hf_config, source, dtype, world, keep_draft=keep_draft)
    stacked, size = stacks_experts(hf_config), int(max_shard_gb * 1e9)
    with contextlib.ExitStack() as stack:
        writer, folder = None, None
        if world.rank == _WRITER:
            writer = FolderWriter(Path(out_dir), content.shapes, content.dtypes, size, stacked=stacked)
            stack.enter_context(writer)
            folder = str(writer.temporary)
        folder = world.broadcast_json(folder)
        writer = writer or FolderWriter(
            Path(out_dir), content.shapes, content.dtypes, size, stacked=stacked, temporary=Path(folder)
        )
        problem = _write_files(chunks, writer, content, world)
        problems = [
            f"rank {rank}: {text}" for rank, text in enumerate(world.all_gather_json(problem and str(problem))) if text
        ]
        if problems:
            raise problem or WorkerError(f"cannot write {out_dir}: {'; '.join(problems[:4])}")
        if world.rank == _WRITER:
            draft, trained = content.draft, chunks[0].weight_table.has_draft
            write_metadata(writer.temporary, hf_config, tokenizer, dtype, **heads, source=source)
            write_draft_layers(writer.temporary, hf_config, 1 if trained else 0 if draft is None else draft.layers)
    world.barrier()


@dataclasses.dataclass(frozen=True)
class _Content:
    """The tensors of an exported folder, in the order in which they are written.

    Attributes:
        sources: name in the folder -> name of the model's tensor; without the tensors of `draft`.
        shapes, dtypes: shape and dtype of every tensor in the folder, by its name in the folder.
        draft: the draft head that the first rank copies from the model's source; None: there is none to copy, or this
            is another rank.
    """

    sources: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    draft: KeptDraft | None

    @classmethod
    def of(
        cls,
        chunks: Sequence[PolicyModel],
        hf_config: PretrainedConfig,
        source: str | Path | None,
        dtype: torch.dtype,
        world: WorkerGroup,
        *,
        keep_draft: bool,
    ) -> _Content:
        """Determine the tensors of the export; only the first rank reads `source`. Collective over `world`."""
        table, draft, copies = chunks[0].weight_table, None, dict[str, list[str]]()
        more: dict[str, list[int]] = {}
        if world.rank == _WRITER:
            copies = repeated_tensors(hf_config, source) if table.has_draft else {}
            wanted = keep_draft and not chunks[0].has_value_head and not table.has_draft
            draft = find_draft(hf_config, source) if wanted else None
            if draft is not None:
                more = {name: list(shape) for name, shape in draft.shapes().items()}
                print(draft.describe(), flush=True)
        copies, more, kinds = world.broadcast_json(
            [copies, more, {} if draft is None else {n: str(kind) for n, kind in draft.dtypes(dtype).items()}]
        )
        of_model, types = table.shapes(), tensor_dtypes(chunks, dtype)
        # Each of the model's tensors is followed by the draft head's copies of it.
        sources = {copy: name for name in of_model for copy in (name, *copies.get(name, ()))}
        shapes = {name: of_model[origin] for name, origin in sources.items()}
        dtypes = {name: types[origin] for name, origin in sources.items()}
        shapes |= {name: tuple(shape) for name, shape in more.items()}
        dtypes |= {name: getattr(torch, kind.removeprefix("torch.")) for name, kind in kinds.items()}
        return cls(sources, shapes, dtypes, draft)


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """Which ranks write the files of an export.

    Attributes:
        owners: name of a tensor -> the ranks that send its pieces, and their pieces.
        writers: name of a tensor -> the rank that gathers and writes it, the same for all tensors of a file.
    """

    owners: dict[str, dict[int, list[tuple[_Key, Piece]]]]
    writers: dict[str, int]

    @classmethod
    def of(
        cls,
        layout: list[Coordinate],
        slices: Callable[[Coordinate], list[Shard]],
        sources: Mapping[str, str],
        files: Mapping[str, int],
    ) -> FilePlan:
        """Divide the files among the replicas of the model, and the files of a replica among the ranks that hold their
        tensors. All replicas write at the same time; a rank gathers the tensors of its files within its replica.

        Args:
            layout: parallel coordinates of all ranks, by rank.
            slices: returns the shards that a rank with the given coordinates has.
            sources: name in the folder -> name of the model's tensor.
            files: name in the folder -> number of its file. The first rank writes every file that also has tensors
                which are not in `sources`.
        """
        twins: dict[Coordinate, list[int]] = {}
        for rank, at in enumerate(layout):
            twins.setdefault(at, []).append(rank)
        first = _owners(layout, slices)
        owners: dict[str, dict[int, list[tuple[_Key, Piece]]]] = {}
        of_file = {file: _WRITER for name, file in files.items() if name not in sources}
        for name, origin in sources.items():
            file = files[name]
            copies = {rank: twins[layout[rank]] for rank in first[origin]}
            owners[name] = {ranks[file % len(ranks)]: first[origin][rank] for rank, ranks in copies.items()}
            holders, replicas = list(owners[name]), len(next(iter(copies.values())))
            of_file.setdefault(file, holders[file // replicas % len(holders)])
        return cls(owners, {name: of_file[files[name]] for name in sources})


def _write_files(
    chunks: Sequence[PolicyModel], writer: FolderWriter, content: _Content, world: WorkerGroup
) -> OSError | None:
    """Write the tensor files of an export that fall to this rank; return the error if writing fails, else None.

    Collective over `world`; after an error the rank still takes part in sending.
    """
    layout, table, kinds = layout_of_all(coordinate(chunks), world), chunks[0].weight_table, tensor_dtypes(chunks)
    files = {name: writer.file_of(name) for name in content.shapes}
    plan = FilePlan.of(layout, table.shards, content.sources, files)
    read = {(shard.chunk, shard.param): reader for shard, reader in weight_readers(chunks)}
    shapes = {name: content.shapes[name] for name in content.sources}
    dtypes = {name: kinds[origin] for name, origin in content.sources.items()}
    gathered = _gathered(shapes, plan.owners, read, dtypes, world, plan.writers)
    problem: OSError | None = None
    for name, tensor in itertools.chain(gathered, () if content.draft is None else content.draft.tensors()):
        beat()
        if tensor is not None and problem is None:
            try:
                writer.add(name, tensor)
            except OSError as error:  # continue, because other ranks still send to and receive from this one
                problem = error
    return problem
