"""Low-rank adapters on Megatron's parallel linear layers, whose weights are frozen.

    y = W x + scale * B A dropout(x),     A [rank, in],  B [out, rank],  scale = alpha / rank      (Hu et al. 2021)

A hook adds the adapter's output to that of its layer. A and B are split such that their product has the layout of the
layer's output (`megarl.models.weights.adapters`), so tensor-parallel ranks exchange only `rank` numbers per token:

    layer split by rows      h = A x, the same on all ranks (or gathered, of a sequence-parallel x), then B's own rows
    layer split by columns   h = the sum over ranks of A's own columns x (or each rank's part of the sequence of it), B
    layer that is not split  h = A x, then B

A parameter that is whole on every rank but processes only a part of the tokens there needs its gradients summed, like a
norm; Megatron does this for parameters with `sequence_parallel` set.

Each expert has its own adapters. All ranks that split an expert get the same rows, and their outputs are summed after
the second projection, so no exchange is needed in between; gradients of whole parameters are summed over these ranks.

Shapes: t tokens of this rank, r rank, n projections in one weight (3 of q, k, v; 2 of gate and up; else 1), E experts
of this process, rows: tokens on their way to an expert.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megarl.architectures.adapters import DOWN, MODULE, is_adapter
from megarl.config.model import LoraConfig
from megarl.models.hf import checkpoint_names, encoder_of
from megarl.models.layers.experts.stacked import StackedLinear
from megarl.models.layers.experts.training import GroupedLinear, expert_groups, grouped_linear
from megarl.models.layers.linear import ReplicatedLinear
from megarl.models.layers.rules import TensorRegion, whole
from megarl.models.weight_table import Shard, as_index, region_shape
from megarl.models.weights.adapters import adapter_slices, adapter_tensors, check_targets
from megarl.models.weights.fill import coordinate, fill, generator_of
from megarl.models.weights.peft import AdapterReader

if TYPE_CHECKING:
    from megarl.models.policy import PolicyModel


class Adapter(torch.nn.Module):
    """The parameters A and B that are added to the weight of a linear layer, or to the weights of a layer's experts.

    Args:
        weight: the layer's weight; for experts the weights of all of them, concatenated by rows.
        a, b: shapes of the parameters.
        heights: rows of each projection within one group of the weight's rows, such as q, k and v of a key/value head.
        experts: number of experts, 1 for a layer without experts.

    Attributes:
        a: [experts * projections * rank, in], or this tensor-parallel rank's columns.
        b: [experts * out, rank] with rows in the order of the layer's weight, or this tensor-parallel rank's rows.
        enabled: False disables the adapter.
    """

    def __init__(
        self,
        weight: Any,
        a: tuple[int, ...],
        b: tuple[int, ...],
        heights: Sequence[int],
        lora: LoraConfig,
        experts: int = 1,
    ) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.empty(a, dtype=weight.dtype, device=weight.device))
        self.b = torch.nn.Parameter(torch.empty(b, dtype=weight.dtype, device=weight.device))
        self.enabled, self.scale, self._rank = True, lora.scale, lora.rank
        self._heights, self._experts = tuple(heights), experts
        for parameter in (self.a, self.b):
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]

    @torch.no_grad()
    def merged(self, weight: Tensor, region: TensorRegion) -> Tensor:
        """Return W + scale * B A in a region of this rank's weight; the rows of the region belong to one projection.

        Computed in float32 or wider and rounded once to the weight's dtype.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        (top, bottom), (left, right) = region
        expert, row = divmod(top, len(self.b) // self._experts)
        part, below = 0, row % sum(self._heights)
        while below >= self._heights[part]:
            below -= self._heights[part]
            part += 1
        first = (expert * len(self._heights) + part) * self._rank
        a = self.a[first : first + self._rank, left:right].to(wide)
        whole = weight[top:bottom, left:right].to(wide)
        return torch.addmm(whole, self.b[top:bottom].to(wide), a, alpha=self.scale).to(weight.dtype)

    def whole(self, weight: Tensor) -> Tensor:
        """Return W + scale * B A for this rank's whole weight."""
        out, top = torch.empty_like(weight), 0
        while top < len(weight):
            for height in self._heights:
                rows = slice(top, top + height)
                out[rows] = self.merged(weight, ((top, top + height), (0, weight.shape[1])))
                top = rows.stop
        return out


class LinearAdapter(Adapter):
    """The adapter of one of Megatron's parallel linear layers."""

    def __init__(self, linear: Any, a: tuple[int, ...], b: tuple[int, ...], heights: Sequence[int], lora: LoraConfig):
        super().__init__(linear.weight, a, b, heights, lora)
        self._dropout, self._by_columns = lora.dropout, isinstance(linear, RowParallelLinear)
        group = linear.tp_group
        self._group = None if group is None or group.size() == 1 else group
        self._sequence = linear.config.sequence_parallel and self._group is not None
        linear.register_forward_hook(self._add)
        if isinstance(linear, ReplicatedLinear):
            for whole in (self.a, self.b):
                whole.sequence_parallel = linear.config.sequence_parallel  # type: ignore[attr-defined]
            return
        split, whole, dim = (self.a, self.b, 1) if self._by_columns else (self.b, self.a, 0)
        set_tensor_model_parallel_attributes(split, is_parallel=True, dim=dim, stride=1)
        whole.sequence_parallel = self._sequence  # type: ignore[attr-defined]

    def _add(self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        if not self.enabled:
            return output
        return output[0] + self(inputs[0]), output[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapter's output for the layer's input [t, 1, in]."""
        if self._dropout:
            x = F.dropout(x, self._dropout, self.training)
        h = F.linear(x, self.a)
        if self._group is not None:
            h = self._exchange(h)
        return self._up(h * self.scale)

    def _exchange(self, h: Tensor) -> Tensor:
        if self._by_columns:
            if self._sequence:
                return reduce_scatter_to_sequence_parallel_region(h, group=self._group)
            return reduce_from_tensor_model_parallel_region(h, group=self._group)
        if self._sequence:
            return gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=True, group=self._group)
        return copy_to_tensor_model_parallel_region(h, group=self._group)

    def _up(self, h: Tensor) -> Tensor:
        """Return B h; rows are in the order of the layer's weight."""
        if len(self._heights) == 1:
            return F.linear(h, self.b)
        groups = self.b.view(-1, sum(self._heights), self._rank)
        parts = []
        for part, rows in zip(h.split(self._rank, -1), groups.split(self._heights, 1), strict=True):
            product = F.linear(part, rows.reshape(-1, self._rank))
            parts.append(product.view(*product.shape[:-1], len(groups), rows.shape[1]))
        return torch.cat(parts, -1).flatten(-2)

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part of the adapter's output [t, out], before any sum over ranks.

        Args:
            x: [t, in], the whole input if tensor parallelism splits the layer by rows, otherwise this rank's columns.
        """
        return self._up(F.linear(x, self.a) * self.scale)


class EncoderAdapter(Adapter):
    """The adapter of a linear layer of a vision encoder, which every tensor-parallel rank has whole."""

    def __init__(self, linear: torch.nn.Linear, a: tuple[int, ...], b: tuple[int, ...], lora: LoraConfig) -> None:
        super().__init__(linear.weight, a, b, b[:1], lora)
        self._dropout = lora.dropout
        for parameter in (self.a, self.b):
            parameter.sequence_parallel = getattr(linear.weight, "sequence_parallel", False)  # type: ignore[attr-defined]
        linear.register_forward_hook(self._add)

    def _add(self, linear: torch.nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + self(inputs[0]) if self.enabled else output

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapter's output [..., out] for the layer's input [..., in]."""
        if self._dropout:
            x = F.dropout(x, self._dropout, self.training)
        return F.linear(F.linear(x, self.a) * self.scale, self.b)


class ExpertAdapters(Adapter):
    """The adapters of one projection (or of gate and up) of each of a process's experts."""

    def __init__(
        self, linear: GroupedLinear | StackedLinear, a: tuple[int, ...], b: tuple[int, ...], lora: LoraConfig
    ) -> None:
        projections, rows = a[0] // (lora.rank * linear.experts), b[0] // linear.experts
        super().__init__(linear.weight, a, b, (rows // projections,) * projections, lora, linear.experts)
        self._by_columns = linear.weight.partition_dim == 1  # type: ignore[attr-defined]
        group = expert_groups().expt_tp
        self._group = None if group.size() == 1 else group
        split, whole, dim = (self.a, self.b, 1) if self._by_columns else (self.b, self.a, 0)
        # Mark only parameters that differ between tensor-parallel ranks: the gradient norm counts others on the first.
        for parameter in (split,) if self._group is not None else (split, whole):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
        linear.register_forward_hook(self._add)

    def _add(self, linear: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        return output + self(*inputs) if self.enabled else output

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the adapters' output [rows, out] for rows [rows, in] that are grouped by expert; `ends` as in
        `grouped_linear`.
        """
        a, b = self.a, self.b
        if self._group is not None and self._by_columns:
            b = copy_to_tensor_model_parallel_region(b, group=self._group)  # its backward pass sums over ranks
        elif self._group is not None:
            a = copy_to_tensor_model_parallel_region(a, group=self._group)
        h = grouped_linear(x, a.view(self._experts, -1, a.shape[1]), ends) * self.scale
        ups = b.view(self._experts, -1, self._rank).split(self._heights, 1)
        parts = zip(h.split(self._rank, -1), ups, strict=True)
        return torch.cat([grouped_linear(part, up, ends) for part, up in parts], -1)


class StackedAdapters(ExpertAdapters):
    """The adapters of one projection of each of a process's experts, whose weights are [experts, in, out]."""

    @torch.no_grad()
    def merged(self, weight: Tensor, region: TensorRegion) -> Tensor:
        """Return W + scale * (B A)^T in a region of this rank's weight [experts, in, out].

        Computed in float32 or wider, one expert after another to save memory, and rounded once to the weight's dtype.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        experts, inputs, outputs = as_index(region)
        a = self.a.view(self._experts, self._rank, -1)[experts, :, inputs]
        b = self.b.view(self._experts, -1, self._rank)[experts, outputs]
        out = weight[as_index(region)].clone()
        for each, down, up in zip(out, a, b, strict=True):
            each.copy_(torch.addmm(each.to(wide), down.T.to(wide), up.T.to(wide), alpha=self.scale))
        return out

    def whole(self, weight: Tensor) -> Tensor:
        """Return the whole weight of this rank with the adapter added."""
        return self.merged(weight, whole(tuple(weight.shape)))


def adapter_of(linear: Any) -> Adapter | None:
    """Return the adapter of a linear layer, or None."""
    adapter: Adapter | None = getattr(linear, MODULE, None)
    return adapter


def adapters_in(chunks: Sequence[torch.nn.Module]) -> list[Adapter]:
    """Return all adapters of this process."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]


def attach(chunks: Sequence[PolicyModel], lora: LoraConfig) -> None:
    """Attach uninitialised adapters to the linear layers that `lora.targets` selects."""
    check_targets(chunks[0].hf_config, lora)
    shards = {(s.chunk, s.param): s for s in adapter_slices(chunks[0].hf_config, coordinate(chunks), lora)}
    for (number, param), shard in shards.items():
        name, _, part = param.rpartition(f".{MODULE}.")
        if part != "a":
            continue
        linear = chunks[number].get_submodule(name)
        down, up = shard.shape, shards[number, f"{name}.{MODULE}.b"]
        if isinstance(linear, GroupedLinear | StackedLinear):
            kind = ExpertAdapters if isinstance(linear, GroupedLinear) else StackedAdapters
            linear.add_module(MODULE, kind(linear, down, up.shape, lora))
            continue
        if isinstance(linear, torch.nn.Linear) and name.startswith("visual."):
            linear.add_module(MODULE, EncoderAdapter(linear, down, up.shape, lora))
            continue
        if not isinstance(linear, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear):
            raise TypeError(
                f"cannot attach an adapter to {name}: {type(linear).__name__} is not a parallel "
                f"linear layer of Megatron"
            )
        heights = _heights(up, down[0] // lora.rank)
        linear.add_module(MODULE, LinearAdapter(linear, down, up.shape, heights, lora))


def _heights(up: Shard, projections: int) -> tuple[int, ...]:
    """Return how many contiguous rows each projection has in a weight, read from the pieces of its B matrix; if the
    weight consists of key/value groups, the rows within one group."""
    runs = (pieces for _, pieces in itertools.groupby(up.pieces, key=lambda piece: piece.source))
    heights = (sum(region_shape(piece.target_region)[0] for piece in pieces) for pieces in runs)
    return tuple(itertools.islice(heights, projections))


def local_adapters(chunks: Sequence[PolicyModel], lora: LoraConfig) -> list[tuple[Shard, torch.nn.Parameter]]:
    """Return this process's adapter shards, each with its parameter."""
    params = {(i, name): p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
    shards = adapter_slices(chunks[0].hf_config, coordinate(chunks), lora)
    return [(shard, params[shard.chunk, shard.param]) for shard in shards]


def init_adapters(chunks: Sequence[PolicyModel], lora: LoraConfig, seed: int) -> None:
    """Read the adapters of `lora.path`, or initialise new ones, with which the model equals its base model.

    A is uniform within 1 / sqrt(in), as in PEFT, and B is zero. A tensor depends only on `seed` and its name, so all
    layouts get the same values.
    """
    shapes = adapter_tensors(chunks[0].hf_config, lora)
    stored = None
    if lora.path is not None:
        stored = AdapterReader(lora.path, "model.lora.path")
        if encoder_of(chunks[0].hf_config) is not None:
            stored.name_as(checkpoint_names(chunks[0].hf_config))
        stored.check(lora, shapes)

    def read(name: str, region: TensorRegion) -> Tensor:
        if stored is not None:
            return stored.read(name)[as_index(region)]
        if not name.endswith(DOWN):
            return torch.zeros(region_shape(region))
        bound = 1 / math.sqrt(shapes[name][1])
        whole = torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator_of(name, seed))
        return whole[as_index(region)]

    fill(local_adapters(chunks, lora), read)


def freeze_base(chunks: Sequence[PolicyModel]) -> None:
    """Freeze all parameters except adapters and a critic's value head."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            head = chunk.has_value_head and name.startswith("output_layer.")
            parameter.requires_grad_(is_adapter(name) or head)


def largest_up(chunks: Sequence[torch.nn.Module]) -> float:
    """Return the largest absolute value in this process's B matrices; 0 if the adapters leave the model unchanged."""
    return max((float(adapter.b.detach().abs().max()) for adapter in adapters_in(chunks)), default=0.0)


@contextlib.contextmanager
def adapters_off(chunks: Sequence[PolicyModel]) -> Iterator[None]:
    """Disable the adapters inside the block: the model is its base model."""
    adapters = adapters_in(chunks)
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
