"""From a batch of samples to the packed micro-batches that go through the model.

A sample with P prompt and R response tokens is fed as P + R - 1 tokens: the last response token predicts nothing.
Response token j is predicted at place P - 1 + j, and only those places reach the vocabulary head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.data.batch import Batch, Jagged
from megarl.data.packing import pack, split_to_count
from megarl.models.packing import PackedSequences, pack_stream
from megarl.training.parallel import Layout


@dataclass(frozen=True)
class MicroBatch:
    """This rank's share of one micro-batch. N is the number of response tokens of the whole micro-batch.

    Attributes:
        samples: positions in the batch; empty for a filler, which only keeps this rank in step with the others.
        input_ids, position_ids: int64 [1, t].
        packed: what attention has to know.
        rows: int64 [n], places among the t tokens that predict a response token; n = N without context parallelism.
        order: int64 [n], which of the N response tokens each row predicts.
        targets: int64 [n], the tokens to predict.
        tokens: N.
    """

    samples: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    packed: PackedSequences
    rows: Tensor
    order: Tensor
    targets: Tensor
    tokens: int


def input_lengths(batch: Batch) -> Tensor:
    """Tokens that each sample puts through the model, int64 [B].

    Raises:
        ValueError: a sample without a response to predict, or without a prompt to predict it from.
    """
    prompts, responses = batch["prompt_ids"].lengths.cpu(), batch["response_ids"].lengths.cpu()
    if len(batch) and min(int(prompts.min()), int(responses.min())) < 1:
        bad = int(((prompts < 1) | (responses < 1)).nonzero()[0])
        raise ValueError(f"sample {bad} has {int(prompts[bad])} prompt and {int(responses[bad])} response tokens")
    return prompts + responses - 1


def plan(batch: Batch, budget: int, layout: Layout, device: torch.device) -> list[list[int]]:
    """Samples of each micro-batch: the same number of micro-batches on all data-parallel ranks, fillers empty.

    With interleaved pipelining the number is a multiple of the pipeline size.
    """
    lengths = input_lengths(batch).tolist()
    wanted = torch.tensor([len(pack(lengths, budget))], device=device)
    count = max(int(layout.dp_group.all_reduce(wanted, "max")), 1)
    if layout.parallel.vpp:
        count = -(-count // layout.pp_size) * layout.pp_size
    # Sequences of equal length go through attention together when they are neighbours.
    return [sorted(group, key=lambda sample: -lengths[sample]) for group in split_to_count(lengths, count, budget)]


def build(
    batch: Batch, samples: Sequence[int], layout: Layout, device: torch.device, total: int | None = None
) -> MicroBatch:
    """Pack `samples` of `batch`; no samples make a filler of one token with one row that counts for nothing.

    The stream is padded to `total` tokens (over all context-parallel ranks) when that is given.
    """
    if samples:
        part = batch.select(list(samples))
        prompts, responses = part["prompt_ids"].to("cpu"), part["response_ids"].to("cpu")
    else:
        prompts = responses = Jagged.from_list([[0]], dtype=torch.int64)
    tokens, predicts = _stream(prompts, responses)
    lengths = (prompts.lengths + responses.lengths - 1).tolist()
    if total is not None:
        extra = _fill_up(lengths, total, layout)
        tokens = torch.cat([tokens, tokens.new_zeros(sum(extra))])
        predicts = torch.cat([predicts, predicts.new_full((sum(extra),), -1)])
        lengths += extra
    stream = pack_stream(
        lengths,
        cp_size=layout.cp_size,
        cp_rank=layout.cp_rank,
        multiple=layout.tp_size,  # sequence parallelism needs it, and mixtures of experts always use that
    )
    # All of this on the host: on a GPU it would wait for the count of rows.
    which = stream.take(predicts, fill=-1)
    rows = (which >= 0).nonzero()[:, 0]
    order = which[rows]
    there = stream.to(device)
    return MicroBatch(
        samples=tuple(samples),
        input_ids=stream.input_ids(tokens).to(device),
        position_ids=there.position_ids,
        packed=there.params,
        rows=rows.to(device),
        order=order.to(device),
        targets=responses.values[order].to(device),
        tokens=len(responses.values),
    )


def build_all(
    batch: Batch, groups: Sequence[Sequence[int]], layout: Layout, device: torch.device
) -> tuple[list[MicroBatch], int]:
    """All micro-batches, and the stream length that Megatron's schedules expect.

    Interleaved stages exchange tensors of one fixed shape: Megatron's exchange of variable shapes hangs there, because
    stages wait for each other's shapes in different calls. So their micro-batches are all padded to the longest.
    """
    total = None
    if layout.parallel.vpp:
        unit = _unit(layout)
        step = math.lcm(unit, layout.cp_size * layout.tp_size)
        lengths = input_lengths(batch)
        longest = max(int((-(-lengths[list(group)] // unit) * unit).sum()) if group else unit for group in groups)
        total = -(-longest // step) * step
    return [build(batch, group, layout, device, total) for group in groups], total or 1


def _unit(layout: Layout) -> int:
    """Every sequence is padded to a multiple of this."""
    return 2 * layout.cp_size if layout.cp_size > 1 else 1


def _fill_up(lengths: list[int], total: int, layout: Layout) -> list[int]:
    """Lengths of padding sequences that bring the stream to `total`, none longer than the longest real one."""
    unit = _unit(layout)
    padded = [-(-length // unit) * unit for length in lengths]
    missing, piece = total - sum(padded), max(padded)
    return [piece] * (missing // piece) + ([missing % piece] if missing % piece else [])


def _stream(prompts: Jagged, responses: Jagged) -> tuple[Tensor, Tensor]:
    """Input tokens [T] of all samples end to end, and for each the response token it predicts, -1 for none [T]."""
    tokens, predicts, done = [], [], 0
    for prompt, response in zip(prompts.unbind(), responses.unbind(), strict=True):
        tokens += [prompt, response[:-1]]
        predicts += [
            torch.full((len(prompt) - 1,), -1, dtype=torch.int64),
            torch.arange(done, done + len(response)),
        ]
        done += len(response)
    return torch.cat(tokens), torch.cat(predicts)
