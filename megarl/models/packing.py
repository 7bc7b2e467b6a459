"""Variable-length sequences as one stream of tokens, and its split over context-parallel ranks.

A stream is the concatenation of all sequences. Each sequence is padded to a multiple of 2 * cp tokens and cut into
2 * cp equal chunks; context-parallel rank r holds chunks r and 2 * cp - 1 - r of every sequence, so that all ranks
have equal shares of causal attention. If sequence parallelism needs it, a dummy sequence at the end pads the stream.
Without context parallelism this is the only padding.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.data.prefix_tree import SharedSpan

HOST = torch.device("cpu")


@dataclass(frozen=True)
class SharedPrefixes:
    """How the nodes of a packed stream depend on each other (`megarl.data.prefix_tree`)."""

    lengths: tuple[int, ...]  # tokens of each node, padding included
    spans: tuple[SharedSpan, ...]  # columns of each inner node, and of the nodes below that see its tokens
    positions: Tensor  # int64 [t], on the CPU, positions of the tokens in their sequences
    multiplicity: Tensor  # int64 [t], on the CPU, number of sequences that have each token; 0 for padding

    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        """The node before each node, -1 for none; nodes lie depth first."""
        starts = [0, *itertools.accumulate(self.lengths)]
        number_at = {start: number for number, start in enumerate(starts[:-1])}
        spans, around, parents = {span.start: span for span in self.spans}, list[SharedSpan](), list[int]()
        for start in starts[:-1]:
            while around and around[-1].last <= start:
                around.pop()
            parents.append(number_at[around[-1].start] if around else -1)
            if start in spans:
                around.append(spans[start])
        return tuple(parents)

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.positions.max()) + 1


@dataclass
class PackedSequences(PackedSeqParams):
    """The layout of a packed stream, for attention. `lengths` are padded lengths over all context-parallel ranks.

    Megatron passes this object to every layer; `cache` holds what the first layer computes for the others.
    """

    lengths: tuple[int, ...] = ()
    # position in each sequence from which on its tokens attend to the whole sequence; tokens before it are causal.
    # Empty: all tokens are causal.
    open_from: tuple[int, ...] = ()
    # image inputs: a `megarl.robots.models.vla.vision.Seen`, a `megarl.models.vlm.model.Images`, or None
    seen: Any = None
    # the tree of shared prefixes: `lengths` then has the tokens of each node of the tree; None: nothing is shared
    prefixes: SharedPrefixes | None = None
    # experts to replay, uint8 or int16 [t, layers * chosen]: those of this rank's tokens (`megarl.data.routes`); None:
    # routers choose
    routes: Tensor | None = None
    # number of a layer -> its keys (after RoPE) and values [t, groups, head], which attention stores here for a head
    # that reads them (an action expert); None: they are not stored
    layer_keys: dict[int, tuple[Tensor, Tensor]] | None = None
    cp_size: int = 1
    cp_rank: int = 0
    padding: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # bool [t], true for padding
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def shared_tokens(self) -> tuple[int, int]:
        """Number of tokens that need not be computed because prefixes are shared, and number of all sequences' tokens.

        Not defined with context parallelism.
        """
        computed = int((~self.padding).sum())
        total = computed if self.prefixes is None else int(self.prefixes.multiplicity.sum())
        return total - computed, total


@dataclass(frozen=True)
class PackedStream:
    """A context-parallel rank's share of a packed stream, the same on all tensor-parallel ranks: `t` tokens, with
    padding.
    """

    params: PackedSequences  # the model's argument `packed_seq_params`
    index: Tensor  # int64 [t], index of each token in the unpadded concatenation of all sequences; -1: padding
    position_ids: Tensor  # int64 [1, t], position of each token in its own sequence

    def to(self, device: torch.device) -> PackedStream:
        """Return the stream with its tensors on `device`, except `params.padding`, which stays where it is."""
        cu = self.params.cu_seqlens_q.to(device)
        params = copy.copy(self.params)
        params.cu_seqlens_q = params.cu_seqlens_kv = cu
        return PackedStream(params, self.index.to(device), self.position_ids.to(device))

    def take(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's share [t, ...] of `values` [total, ...], with `fill` at padding."""
        share = values.index_select(0, self.index.clamp(min=0))
        return share.masked_fill((self.index < 0).view(-1, *[1] * (values.dim() - 1)), fill)

    def input_ids(self, values: Tensor) -> Tensor:
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
    """Lay out sequences of `lengths` tokens as one stream and return the share of `cp_rank`.

    Args:
        lengths: tokens of each sequence, at least 1 each.
        cp_size, cp_rank: context-parallel group.
        multiple: the share's token count is padded to a multiple of this (the tensor-parallel size under sequence
            parallelism, else 1).
        open_from: position in each sequence from which on its tokens attend to the whole sequence; empty: all tokens
            are causal, as they must be with context parallelism.
        device: device of the index tensors.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"packing needs at least one sequence and no empty one, got lengths {list(lengths)[:8]}")
    if open_from and (cp_size > 1 or len(open_from) != len(lengths)):
        raise ValueError(
            "open_from needs one number per sequence (where its tokens begin to attend to the whole sequence) and no "
            f"context parallelism; found {len(open_from)} numbers for {len(lengths)} sequences, and {cp_size} "
            "context-parallel ranks"
        )
    unit = 2 * cp_size if cp_size > 1 else 1
    padded = [-(-n // unit) * unit for n in lengths]
    short = -(sum(padded) // cp_size) % multiple
    if short:
        padded.append(-(-short * cp_size // unit) * unit)
        while sum(padded) // cp_size % multiple:
            padded[-1] += unit
    index, positions = _full_index(list(lengths), padded)
    share = cp_split(padded, cp_size, cp_rank)
    if share is not None:
        index, positions = index[share], positions[share]
    cu = torch.tensor([0, *padded], dtype=torch.int64).cumsum(0).to(torch.int32)
    longest = max(padded)
    params = PackedSequences(
        qkv_format="sbhd",  # with "thd" Megatron would apply RoPE itself and refuse this layout
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(padded),
        open_from=(*open_from, *[0] * (len(padded) - len(lengths))) if open_from else (),
        cp_size=cp_size,
        cp_rank=cp_rank,
        padding=index < 0,
    )
    return PackedStream(params, index, positions.unsqueeze(0)).to(device)


def _full_index(lengths: list[int], padded: list[int]) -> tuple[Tensor, Tensor]:
    """Return, for every token of the padded stream, its index in the unpadded concatenation (-1: padding) and
    position."""
    positions = torch.cat([torch.arange(n) for n in padded])
    real = torch.tensor([*lengths, *[0] * (len(padded) - len(lengths))])
    sizes = torch.tensor(padded)
    start = (real.cumsum(0) - real).repeat_interleave(sizes)
    inside = positions < real.repeat_interleave(sizes)
    return torch.where(inside, start + positions, -1), positions


def cp_split(padded: Sequence[int], cp_size: int, cp_rank: int) -> Tensor | None:
    """Return the indices into the padded stream of the tokens of `cp_rank`, in order; None without context
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


def places_on_ranks(padded: Sequence[int], cp_size: int) -> Tensor:
    """Return, for each token of the padded stream, its index in the concatenation of all ranks' tokens."""
    parts = [cp_split(padded, cp_size, rank) for rank in range(cp_size)]
    return inverse_order(torch.cat([part for part in parts if part is not None]))


def inverse_order(order: Tensor) -> Tensor:
    """Return the inverse of a permutation int64 [n]."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places
