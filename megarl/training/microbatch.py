"""Packing of a batch of rows into the micro-batches that go through the model.

The sequence layout (megarl/training/sequence_layout.py) turns a row into a sequence. Only columns that predict a
response token reach the vocabulary head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.data.batch import Batch
from megarl.data.fields import KEPT, KEPT_COUNTS
from megarl.data.kept_tokens import KeptTokens
from megarl.data.packing import bundles, pack, split_to_count
from megarl.data.prefix_tree import PrefixTree
from megarl.models.packing import PackedSequences, PackedStream, SharedPrefixes, pack_stream
from megarl.training.parallel import Layout
from megarl.training.sequence_layout import TEXT, PackedRows, SequenceLayout

#: On GPUs, pipeline stages get micro-batches of equal length if the padding adds at most this share of their tokens.
#: Interleaved stages (`vpp`) always get them.
PADDING = 0.05


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
    # The micro-batch of a draft head, which predicts the token after the next one: `input_ids` has each column's next
    # token, and `rows` are one column earlier (arbitrary for the first token after a prompt of one token).
    draft: MicroBatch | None = None


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
    """Return the indices of each micro-batch's rows. All data-parallel ranks get equally many micro-batches; some may
    be empty.

    With `together=False` only this replica has rows. Every `unit` consecutive rows are in one micro-batch, in order. A
    patch of an image counts as `patch_tokens` tokens; rows with the same images are put together if possible, so that
    these images count once. So are rows of one prompt where rows share prefixes. With interleaved pipelining the number
    of micro-batches is a multiple of the pipeline size.
    """
    rows = sequences.lengths(batch).view(-1, unit)
    joined, lengths = bundles(*_costs(batch, rows, sequences, patch_tokens), budget)
    wanted = torch.tensor([len(pack(lengths, budget))], device=device)
    count = max(int(layout.dp_group.all_reduce(wanted, "max") if together else wanted), 1)
    if layout.parallel.vpp:
        count = -(-count // layout.pp_size) * layout.pp_size
    longest = rows.max(1).values.tolist()
    groups = [[number for part in group for number in joined[part]] for group in split_to_count(lengths, count, budget)]
    # Rows of equal length become neighbours, which attention computes as one batch.
    ordered = [sorted(group, key=lambda number: (-longest[number], number)) for group in groups]
    return [[number * unit + i for number in group for i in range(unit)] for group in ordered]


def indivisible(
    batch: Batch, budget: int, sequences: SequenceLayout = TEXT, *, unit: int = 1, patch_tokens: float = 0.0
) -> tuple[list[list[int]], list[int]]:
    """Return the sets of rows that `plan` keeps together in one micro-batch, as row indices, and each set's tokens."""
    joined, lengths = bundles(*_costs(batch, sequences.lengths(batch).view(-1, unit), sequences, patch_tokens), budget)
    return [[number * unit + i for number in part for i in range(unit)] for part in joined], lengths


def _costs(
    batch: Batch, rows: Tensor, sequences: SequenceLayout, patch_tokens: float
) -> tuple[list[int], list[dict[int, int]]]:
    """Return, for each unit (rows that stay in one micro-batch), its number of tokens, and inputs that it may share.

    The inputs, images or prompts, are a dict for each unit: number of the input -> its tokens.

    Args:
        rows: the row numbers [units, rows of a unit].
    """
    patches, prompts = sequences.patches(batch), sequences.prompts(batch)
    parts = [[math.ceil(count * patch_tokens) for count in counts.values()] for counts in patches]
    inputs = [dict(zip(counts, part, strict=True)) for counts, part in zip(patches, parts, strict=True)] or prompts
    unit = rows.shape[1]
    shared = [
        {number: tokens for each in inputs[first : first + unit] for number, tokens in each.items()}
        for first in range(0, len(batch), unit)
    ]
    if not prompts:
        return rows.sum(1).tolist(), shared
    of_prompts = torch.tensor([sum(each.values()) for each in prompts], dtype=torch.int64).view(-1, unit)
    # The last token is no input, so a response of one token adds 0 tokens to its prompt. It counts as 1.
    return (rows - of_prompts).sum(1).clamp(min=1).tolist(), shared


def build(
    batch: Batch,
    samples: Sequence[int],
    layout: Layout,
    device: torch.device,
    total: int | None = None,
    sequences: SequenceLayout = TEXT,
    multiple: int = 1,
) -> MicroBatch:
    """Pack the rows `samples` (indices) of `batch` into a micro-batch; without any, a filler that adds 0 to the loss.

    The packed tokens are padded to `total` tokens (over all context-parallel ranks), if given, and so that each
    tensor-parallel rank has a multiple of `multiple` tokens.
    """
    rows_of = batch.select(list(samples))
    packed = sequences.pack(rows_of) if samples else sequences.filler()
    tokens, lengths, opens = packed.tokens, list(packed.lengths), list(packed.open_from)
    positions, counted = packed.positions, sum(packed.lengths) if samples else 0
    if total is not None:
        # Padding sequences fill the packed stream up to `total`; none is longer than the longest real one.
        unit = _unit(layout)
        padded = [-(-length // unit) * unit for length in lengths]
        missing, piece = total - sum(padded), max(padded)
        extra = [piece] * (missing // piece) + ([missing % piece] if missing % piece else [])
        tokens = torch.cat([tokens, tokens.new_zeros(sum(extra))])
        positions = None if positions is None else F.pad(positions, (0, sum(extra)))
        lengths += extra
        opens += [0] * len(extra) if opens else []
    # Sequence parallelism, which mixtures of experts always use with tp > 1, divides the stream evenly among the
    # tensor-parallel ranks. FP8 needs a multiple of `multiple` tokens on each of them.
    stream = pack_stream(
        lengths, cp_size=layout.cp_size, cp_rank=layout.cp_rank, multiple=layout.tp_size * multiple, open_from=opens
    )
    rows, order = _rows_here(stream.index, packed.sources, len(tokens))
    moved = stream.to(device)
    if packed.prefixes is not None:
        _share(packed.prefixes, stream, moved.params)
    # Routers count the tokens of samples, not those of a filler and of the padding sequences above.
    moved.params.padding = ~stream.take(torch.arange(len(tokens)) < counted, fill=False)
    seen = packed.seen if packed.seen is None or layout.cp_size == 1 else packed.seen.share(stream.index)
    moved.params.seen = None if seen is None else seen.to(device)
    moved.params.layer_keys = {} if packed.keeps_keys else None
    if packed.routes is not None:
        form, routes = packed.routes
        whole = torch.cat([routes, form.empty(len(tokens) - len(routes))])
        moved.params.routes = stream.take(whole, fill=form.none).to(device)
    micro = MicroBatch(
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
    following = None if packed.following is None else F.pad(packed.following, (0, len(tokens) - len(packed.following)))
    return micro if following is None else replace(micro, draft=_of_draft(micro, packed, following, stream))


def _of_draft(micro: MicroBatch, packed: PackedRows, following: Tensor, stream: PackedStream) -> MicroBatch:
    """Return the micro-batch that trains the draft head, which predicts the token after the next one.

    Args:
        following: the next token of every column, padding sequences included.
    """
    rows, order = _rows_here(stream.index, (packed.sources - 1).clamp(min=0), len(following))
    made = stream.input_ids(following), rows, order, packed.targets[order]
    ids, rows, order, targets = (tensor.to(micro.input_ids.device) for tensor in made)
    return replace(micro, input_ids=ids, rows=rows, order=order, targets=targets)


def _share(tree: PrefixTree, stream: PackedStream, params: PackedSequences) -> None:
    """Add the prefix tree of the packed rows to the parameters of attention; later columns are padding."""
    arrays = tree.positions(), tree.multiplicity()
    missing = len(stream.index) - len(arrays[0])
    positions, counts = (F.pad(torch.from_numpy(values), (0, missing)) for values in arrays)
    params.prefixes = SharedPrefixes(params.lengths, tree.spans(), positions, counts)
    params.max_seqlen_q = params.max_seqlen_kv = params.prefixes.longest


def _rows_here(index: Tensor, sources: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return which of this rank's tokens predict response tokens, and which of these they predict, int64 [n] both.

    Computed on the host: on a GPU this would wait for the number of rows.

    Args:
        index: the column of each token, -1 for padding.
        sources: int64 [N], the column that predicts each response token, of `columns` columns.
    """
    real = (index >= 0).nonzero()[:, 0]
    here = torch.full((columns,), -1)
    here[index[real]] = real
    rows = here[sources]
    order = (rows >= 0).nonzero()[:, 0]
    return rows[order], order


def _kept(rows: Batch) -> Tensor:
    """Return, for each response token, the ids that the sampling filters kept, int64 [N, K], filled up with -1."""
    return KeptTokens(*(rows[name].to("cpu").values for name in KEPT)).padded()


def build_all(
    batch: Batch,
    groups: Sequence[Sequence[int]],
    layout: Layout,
    device: torch.device,
    sequences: SequenceLayout = TEXT,
    multiple: int = 1,
) -> tuple[list[MicroBatch], int | None]:
    """Return all micro-batches, and their number of tokens if they are padded to equal length, else None.

    Interleaved pipeline stages exchange tensors of one fixed shape, so all micro-batches are padded to the longest.
    Megatron's exchange of variable shapes would hang, because stages wait for each other's shapes in different calls.

    Other pipeline stages send the shape ahead of each tensor. On a GPU this makes the host wait for the device twice
    per tensor, and the device runs out of work. So micro-batches are padded on GPUs too, if the padding adds at most
    `PADDING` of their tokens.
    """
    total = None
    if layout.parallel.vpp or (layout.pp_size > 1 and device.type == "cuda"):
        step = math.lcm(_unit(layout), layout.cp_size * layout.tp_size * multiple)
        totals = _packed_tokens(batch, groups, layout, sequences)
        longest = -(-max(totals) // step) * step
        if layout.parallel.vpp or longest * len(totals) <= (1 + PADDING) * sum(totals):
            total = longest
    return [build(batch, group, layout, device, total, sequences, multiple) for group in groups], total


def _packed_tokens(
    batch: Batch, groups: Sequence[Sequence[int]], layout: Layout, sequences: SequenceLayout
) -> list[int]:
    """Return the number of packed tokens of each micro-batch with rows, and once that of a filler if any micro-batch
    has no rows."""
    unit = _unit(layout)
    padded = -(-sequences.lengths(batch) // unit) * unit
    if sequences.prompts(batch):
        totals = [sum(sequences.pack(batch.select(list(group))).lengths) for group in groups if group]
    else:
        totals = [int(padded[list(group)].sum()) for group in groups if group]
    if len(totals) < len(groups):
        totals.append(sum(-(-length // unit) * unit for length in sequences.filler().lengths))
    return totals


def _unit(layout: Layout) -> int:
    """Return the number of tokens to whose multiple every sequence is padded."""
    return 2 * layout.cp_size if layout.cp_size > 1 else 1
