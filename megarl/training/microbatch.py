"""Packing of a batch of rows into the micro-batches that go through the model.

The sequence layout (megarl/training/sequence_layout.py) turns a row into a sequence. Only columns that predict a
response token reach the vocabulary head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.data.batch import Batch
from megarl.data.fields import KEPT, KEPT_COUNTS
from megarl.data.kept_tokens import KeptTokens
from megarl.data.packing import bundles, pack, split_to_count
from megarl.models.packing import PackedSequences, pack_stream
from megarl.training.parallel import Layout
from megarl.training.sequence_layout import TEXT, SequenceLayout


@dataclass(frozen=True)
class MicroBatch:
    """This rank's share of one micro-batch. N is the number of response tokens in the whole micro-batch."""

    # positions in the batch; empty for a filler, with which this rank takes part in collectives only
    samples: tuple[int, ...]
    input_ids: Tensor  # int64 [1, t]
    position_ids: Tensor  # int64 [1, t], or [3, t] where positions have three numbers
    packed: PackedSequences  # the packed layout for attention
    rows: Tensor  # int64 [n], indices of the t tokens that predict a response token; n = N without context parallelism
    order: Tensor  # int64 [n], which of the N response tokens each row predicts
    targets: Tensor  # int64 [n], the tokens to predict
    tokens: int  # N, the number of response tokens
    kept_tokens: Tensor | None = None  # int64 [n, K], the tokens kept in sampling each target, where -1 is none


def plan(
    batch: Batch,
    budget: int,
    layout: Layout,
    device: torch.device,
    sequences: SequenceLayout = TEXT,
    *,
    together: bool = True,
    unit: int = 1,
    patch_tokens: float = 0.0,
) -> list[list[int]]:
    """Return the rows of each micro-batch. All data-parallel ranks get the same number; some may be empty.

    With `together=False` only this replica has rows. Every `unit` consecutive rows are in one micro-batch, in order. A
    patch of an image counts as `patch_tokens` tokens; rows with the same images are put together if possible, so that
    these images count once. With interleaved pipelining the number of micro-batches is a multiple of the pipeline size.
    """
    rows = sequences.lengths(batch).view(-1, unit)
    patches = sequences.patches(batch)
    shared = [
        {
            image: math.ceil(count * patch_tokens)
            for counts in patches[first : first + unit]
            for image, count in counts.items()
        }
        for first in range(0, len(batch), unit)
    ]
    joined, lengths = bundles(rows.sum(1).tolist(), shared, budget)
    wanted = torch.tensor([len(pack(lengths, budget))], device=device)
    count = max(int(layout.dp_group.all_reduce(wanted, "max") if together else wanted), 1)
    if layout.parallel.vpp:
        count = -(-count // layout.pp_size) * layout.pp_size
    # Attention batches neighbours of equal length.
    longest = rows.max(1).values.tolist()
    groups = [[number for part in group for number in joined[part]] for group in split_to_count(lengths, count, budget)]
    ordered = [sorted(group, key=lambda number: (-longest[number], number)) for group in groups]
    return [[number * unit + i for number in group for i in range(unit)] for group in ordered]


def build(
    batch: Batch,
    samples: Sequence[int],
    layout: Layout,
    device: torch.device,
    total: int | None = None,
    sequences: SequenceLayout = TEXT,
    multiple: int = 1,
) -> MicroBatch:
    """Pack `samples` of `batch` into a micro-batch; without samples, a filler micro-batch that adds zero to the loss.

    The packed tokens are padded to `total` tokens (over all context-parallel ranks), if given, and so that each
    tensor-parallel rank has a multiple of `multiple` tokens.
    """
    rows_of = batch.select(list(samples))
    packed = sequences.pack(rows_of) if samples else sequences.filler()
    tokens, predicts, lengths, opens = packed.tokens, packed.predicts, list(packed.lengths), list(packed.open_from)
    positions, counted = packed.positions, sum(packed.lengths) if samples else 0
    if total is not None:
        # Padding sequences fill the packed stream up to `total`; none is longer than the longest real one.
        unit = _unit(layout)
        padded = [-(-length // unit) * unit for length in lengths]
        missing, piece = total - sum(padded), max(padded)
        extra = [piece] * (missing // piece) + ([missing % piece] if missing % piece else [])
        tokens = torch.cat([tokens, tokens.new_zeros(sum(extra))])
        predicts = torch.cat([predicts, predicts.new_full((sum(extra),), -1)])
        positions = None if positions is None else torch.cat([positions, positions.new_zeros(3, sum(extra))], 1)
        lengths += extra
        opens += [0] * len(extra) if opens else []
    stream = pack_stream(
        lengths,
        cp_size=layout.cp_size,
        cp_rank=layout.cp_rank,
        multiple=layout.tp_size * multiple,  # needed for sequence parallelism, which mixtures of experts always use
        open_from=opens,
    )
    # Computed on the host: on a GPU this would wait for the number of rows.
    which = stream.take(predicts, fill=-1)
    rows = (which >= 0).nonzero()[:, 0]
    order = which[rows]
    moved = stream.to(device)
    # Routers count the tokens of samples, not those of a filler and of the padding sequences above.
    moved.params.padding = ~stream.take(torch.arange(len(tokens)) < counted, fill=False)
    if packed.seen is not None:
        moved.params.seen = packed.seen.to(device)
    if packed.routes is not None:
        form, routes = packed.routes
        whole = torch.cat([routes, form.empty(len(tokens) - len(routes))])
        moved.params.routes = stream.take(whole, fill=form.none).to(device)
    return MicroBatch(
        samples=tuple(samples),
        input_ids=stream.input_ids(tokens).to(device),
        position_ids=moved.position_ids if positions is None else stream.take(positions.t()).t().to(device),
        packed=moved.params,
        rows=rows.to(device),
        order=order.to(device),
        targets=packed.targets[order].to(device),
        tokens=len(packed.targets),
        kept_tokens=_kept(rows_of)[order].to(device) if samples and KEPT_COUNTS in batch.names() else None,
    )


def _kept(rows: Batch) -> Tensor:
    """Return the kept tokens of all response tokens, int64 [N, K], where -1 is none."""
    return KeptTokens(*(rows[name].to("cpu").values for name in KEPT)).padded()


def build_all(
    batch: Batch,
    groups: Sequence[Sequence[int]],
    layout: Layout,
    device: torch.device,
    sequences: SequenceLayout = TEXT,
    multiple: int = 1,
) -> tuple[list[MicroBatch], int]:
    """Return all micro-batches, and the number of packed tokens that Megatron's schedules expect.

    Interleaved pipeline stages exchange tensors of one fixed shape, so all micro-batches are padded to the longest.
    Megatron's exchange of variable shapes would hang, because stages wait for each other's shapes in different calls.
    """
    total = None
    if layout.parallel.vpp:
        unit = _unit(layout)
        step = math.lcm(unit, layout.cp_size * layout.tp_size * multiple)
        padded = -(-sequences.lengths(batch) // unit) * unit
        filler = sum(-(-length // unit) * unit for length in sequences.filler().lengths)
        longest = max(int(padded[list(group)].sum()) if group else filler for group in groups)
        total = -(-longest // step) * step
    return [build(batch, group, layout, device, total, sequences, multiple) for group in groups], total or 1


def _unit(layout: Layout) -> int:
    """Return the number to a multiple of which the length of every sequence is padded."""
    return 2 * layout.cp_size if layout.cp_size > 1 else 1
