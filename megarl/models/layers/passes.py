"""The passes of decoding, which the decoders of all kinds of layers process, and the caches of a session.

A pass runs tokens through all layers of this process: one new token of each running sample (`DecodeStep`), whole
prompts (`Prompts`), or new tokens of sequences whose earlier positions are cached (`Extension`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.models.layers.mesh import Mesh

Linear = Callable[[Tensor], Tensor]


class RopeTables:
    """The rotary tables of t tokens: cos and sin, [t, R / 2] each; the first R numbers of a head are rotated."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    @cached_property
    def wide(self) -> tuple[Tensor, Tensor]:
        """cos and sign-folded sin, each [t, 1, 1, R], so that RoPE is x * cos + swap_halves(x) * sin."""
        return (torch.cat((self.cos, self.cos), -1)[:, None, None], torch.cat((-self.sin, self.sin), -1)[:, None, None])


@dataclass(frozen=True)
class Room:
    """The size and place of a session's caches.

    slots: number of rows. max_length: maximum positions per row. tp: tensor-parallel ranks. dtype, device: of cached
    keys and values. fixed: keep one memory layout (GPU).
    """

    slots: int
    max_length: int
    tp: int
    dtype: torch.dtype
    device: torch.device
    fixed: bool


class Store(Protocol):
    """The memory of running samples, by row, of the layers of one kind on this process: cached positions or a state."""

    length: int
    """Positions for which each row has memory now; 0: the kind keeps a state, not positions."""

    def __init__(self, mixer: Any, layers: int, room: Room) -> None:
        """Allocate memory for `room.slots` samples in `layers` layers."""

    @staticmethod
    def bytes_per_row(mixer: Any, layers: int, max_length: int, tp: int, dtype: torch.dtype) -> int:
        """Return the bytes that one sample needs on this rank."""

    def reserve(self, rows: int, needed: int) -> None:
        """Resize to at least `needed` positions if fewer or far more are allocated; keep the first `rows` rows."""

    def clear(self, rows: Tensor) -> None:
        """Reset the states of `rows` for new samples that are not prefilled: they decode from position 0."""

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` to `targets` in all layers; all rows are read before any row is written."""


class Caches:
    """The stores of a session, by kind of layer.

    Attributes:
        slots: number of rows.
        max_length: maximum positions per row.
        fixed: whether one memory layout is kept (GPU).
    """

    def __init__(self, stores: Mapping[str, Store], room: Room) -> None:
        self._stores, self.slots, self.max_length, self.fixed = stores, room.slots, room.max_length, room.fixed

    def add(self, name: str, store: Any) -> None:
        """Add a store of per-row state that belongs to no kind of layer, such as the record of expert routes."""
        self._stores = {**self._stores, name: store}

    def __getitem__(self, kind: str) -> Any:
        return self._stores[kind]

    @property
    def length(self) -> int:
        """Positions for which each row has memory now."""
        return max(store.length for store in self._stores.values())

    def reserve(self, rows: int, needed: int) -> None:
        """Make room for `needed` positions in the first `rows` rows, in the stores of all kinds of layers."""
        for store in self._stores.values():
            store.reserve(rows, needed)

    def clear(self, rows: Tensor) -> None:
        """Reset the states of `rows` in the stores of all kinds of layers."""
        for store in self._stores.values():
            store.clear(rows)

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` to `targets` in the stores of all kinds of layers."""
        for store in self._stores.values():
            store.copy_rows(sources, targets)


@dataclass
class _Pass:
    """The fields that all kinds of forward passes of a session have.

    Attributes:
        caches: the session's caches.
        memo: values that the first layer computes for the others, by a name that the kind chooses.
        rope: tables of the pass's tokens, set by the decoder.
        other_ropes: tables of layers that have others, by name.
        routes: gets the experts, int64 [n, k], that each layer with experts chose; None: not recorded.
    """

    caches: Caches
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, kw_only=True)
    rope: RopeTables = field(init=False, repr=False)
    routes: list[Tensor] | None = field(default=None, repr=False, kw_only=True)
    other_ropes: dict[str | None, RopeTables] = field(default_factory=dict, repr=False, kw_only=True)


@dataclass
class DecodeStep(_Pass):
    """One new token in each of the first n rows.

    positions: int64 [n]. length: number of cached positions that are read, at most. live: bool [n], rows whose state
    this token changes; None: all of them. A row that has ended is computed until the host looks, and a row that only
    pads the batch always is.
    """

    positions: Tensor
    length: int
    live: Tensor | None = None


@dataclass
class Prompts(_Pass):
    """Packed whole prompts that start at position 0; the keys and values, or the state, of each go to all of its rows.

    lengths: tokens of each prompt in the stream. rows: cache rows of each prompt.
    """

    lengths: Sequence[int]
    rows: Sequence[Sequence[int]]


@dataclass
class Extension(_Pass):
    """Packed new tokens of sequences whose earlier positions are cached.

    lengths: new tokens of each sequence in the stream. starts: cached positions of each. rows: cache row of each.
    """

    lengths: Sequence[int]
    starts: Sequence[int]
    rows: Sequence[int]


Pass = DecodeStep | Prompts | Extension


class Preparation(Protocol):
    """How weights are prepared for decoding; implemented by `megarl.rollout.embedded.model.Recipe`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of decoding."""

    def cast(self, weight: Tensor) -> Tensor:
        """Return the weight itself, or a copy in the decoding dtype."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the function x [n, in] -> x W^T + b [n, out]."""

    def norm(self, weight: Tensor) -> Tensor:
        """Return the scale of a layer norm or head norm, in the decoding dtype or wider."""

    def layer(self, linear: Any) -> Linear:
        """Return the function x -> y of one of the model's linear layers, LoRA adapter included."""

    def merged(self, linear: Any) -> Tensor:
        """Return the weight of a linear layer in the decoding dtype, with its LoRA adapter added."""


class MixerDecoder(Protocol):
    """One layer's mixer while decoding.

    Args:
        module: the training module, whose weights are read without a copy.
        mixer: the layer's sizes.
        number: index of the layer among this process's layers of the same kind.
        prepared: casts and arranges the module's weights for decoding.
        kernels: kernels of decode steps (`DecodeKernels`); None: torch.
    """

    def __init__(
        self, module: Any, mixer: Any, number: int, mesh: Mesh, prepared: Preparation, kernels: Any
    ) -> None: ...

    def __call__(self, x: Tensor, step: Pass) -> Tensor:
        """Return the mixer's output [n, h] of normed hidden states x [n, h], before the sum over tensor-parallel
        ranks."""
