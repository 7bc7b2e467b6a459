"""Variable-length sequences as one stream of tokens, and how context parallelism shares that stream out.

A stream is the concatenation of all sequences. Each sequence is padded to a multiple of 2 * cp tokens and cut into
2 * cp equal chunks; context-parallel rank r holds chunks r and 2 * cp - 1 - r of every sequence, so that all ranks do
the same share of causal attention. A last dummy sequence fills the stream up where sequence parallelism needs it.
Without context parallelism nothing is padded but that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

HOST = torch.device("cpu")


@dataclass
class PackedSequences(PackedSeqParams):
    """The layout of a packed stream, for attention. `lengths` are padded lengths over all context-parallel ranks.

    Megatron passes it through to every layer; `cache` holds what the first layer computes for the others.

    Attributes:
        open_from: place in each sequence from which on its tokens see all of the sequence, also what comes after them;
            those before it see what came before. Empty: no token sees what comes after it.
        seen: what the policy sees: a `megarl.robots.models.vla.vision.Seen`, or a `megarl.models.vlm.model.Images`.
    """

    lengths: tuple[int, ...] = ()
    open_from: tuple[int, ...] = ()
    seen: Any = None
    cp_size: int = 1
    cp_rank: int = 0
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class PackedStream:
    """This rank's share of a stream of `t` tokens.

    Attributes:
        params: for the model's `packed_seq_params`.
        index: int64 [t], where each token stands in the unpadded concatenation of all sequences; -1 is padding.
        position_ids: int64 [1, t], place of each token in its own sequence.
    """

    params: PackedSequences
    index: torch.Tensor
    position_ids: torch.Tensor

    def to(self, device: torch.device) -> PackedStream:
        """Move all tensors to `device`."""
        cu = self.params.cu_seqlens_q.to(device)
        params = copy.copy(self.params)
        params.cu_seqlens_q = params.cu_seqlens_kv = cu
        return PackedStream(params, self.index.to(device), self.position_ids.to(device))

    def take(self, values: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Return this rank's share [t, ...] of `values` [total, ...], `fill` at padding."""
        taken = values.index_select(0, self.index.clamp(min=0))
        return taken.masked_fill((self.index < 0).view(-1, *[1] * (values.dim() - 1)), fill)

    def input_ids(self, values: torch.Tensor) -> torch.Tensor:
        """Return the token ids [1, t] of the unpadded concatenation `values` [total]; padding is token 0."""
        return self.take(values).unsqueeze(0)


def pack_stream(
    lengths: Sequence[int],
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    multiple: int = 1,
    open_from: Sequence[int] = (),
    device: torch.device = HOST,
) -> PackedStream:
    """Lay sequences of `lengths` tokens out as one stream and cut out the share of `cp_rank`.

    Args:
        lengths: tokens of each sequence, at least 1 each.
        cp_size, cp_rank: context-parallel group.
        multiple: the share's token count is padded to a multiple of this (the tensor-parallel size under sequence
            parallelism, else 1).
        open_from: see `PackedSequences`, one number per sequence; none of them with context parallelism.
        device: where the index tensors live.

    Raises:
        ValueError: no sequence, an empty one, or `open_from` does not fit.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"a stream needs at least one sequence and no empty one, got lengths {list(lengths)[:8]}")
    if open_from and (cp_size > 1 or len(open_from) != len(lengths)):
        raise ValueError(f"{len(open_from)} sequences of {len(lengths)} see both ways, with {cp_size} context ranks")
    unit = 2 * cp_size if cp_size > 1 else 1
    padded = [-(-n // unit) * unit for n in lengths]
    short = -(sum(padded) // cp_size) % multiple
    if short:
        padded.append(-(-short * cp_size // unit) * unit)
        while sum(padded) // cp_size % multiple:
            padded[-1] += unit
    index, positions = _full_index(list(lengths), padded)
    mine = cp_split(padded, cp_size, cp_rank)
    if mine is not None:
        index, positions = index[mine], positions[mine]
    cu = torch.tensor([0, *padded], dtype=torch.int64).cumsum(0).to(torch.int32)
    longest = max(padded)
    params = PackedSequences(
        qkv_format="sbhd",  # Megatron's own "thd" path would apply RoPE by itself and refuse this layout
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(padded),
        open_from=(*open_from, *[0] * (len(padded) - len(lengths))) if open_from else (),
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    return PackedStream(params, index, positions.unsqueeze(0)).to(device)


def _full_index(lengths: list[int], padded: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index into the unpadded concatenation (-1: padding) and position of every token of the padded
    stream."""
    positions = torch.cat([torch.arange(n) for n in padded])
    real = torch.tensor([*lengths, *[0] * (len(padded) - len(lengths))])
    sizes = torch.tensor(padded)
    start = (real.cumsum(0) - real).repeat_interleave(sizes)
    inside = positions < real.repeat_interleave(sizes)
    return torch.where(inside, start + positions, -1), positions


def cp_split(padded: Sequence[int], cp_size: int, cp_rank: int) -> torch.Tensor | None:
    """Return the indices into the padded stream, in order, of the tokens `cp_rank` holds; None without context
    parallelism."""
    if cp_size == 1:
        return None
    parts, start = [], 0
    for length in padded:
        chunk = length // (2 * cp_size)
        for c in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(start + c * chunk, start + (c + 1) * chunk))
        start += length
    return torch.cat(parts)
