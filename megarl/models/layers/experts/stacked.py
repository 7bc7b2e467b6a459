"""Experts whose parameters have the layout of checkpoints with one tensor for all experts: [experts, in, out], with
biases and a clamped activation (gpt-oss).

    row x of expert e with weight w  ->  w * (activation(x U_e + a_e) D_e + b_e) = (w * activation(...)) D_e + w * b_e
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.models.config import PolicyConfig
from megarl.models.layers.experts.clamped import clamped_gate
from megarl.models.layers.experts.training import grouped_linear, has_dense_gradient
from megarl.system.device import device


def add_bias(x: Tensor, bias: Tensor, experts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Add to each row of x [n, out] the bias of its expert, times the row's weight.

    The gradient of the biases is a matrix product, whose sums have the same order in every run.

    Args:
        bias: [E, out].
        experts: int64 [n]; E for rows without an expert, which get an arbitrary bias and give no gradient.
        weights: float32 [n]; None: 1.
    """
    return _AddBias.apply(x, bias, experts, weights)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, experts: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(bias, experts, weights)
        rows = bias.index_select(0, experts.clamp(max=len(bias) - 1))
        return x + (rows if weights is None else rows * weights[:, None]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
        bias, experts, weights = ctx.saved_tensors
        numbers = torch.arange(len(bias), device=experts.device)
        rows_of_expert = (experts == numbers[:, None]).to(grad.dtype)
        if weights is None:
            return grad, rows_of_expert @ grad, None, None
        rows = bias.index_select(0, experts.clamp(max=len(bias) - 1))
        dweights = (grad * rows.to(weights.dtype)).sum(-1)
        return grad, rows_of_expert @ (grad * weights[:, None]).to(grad.dtype), None, dweights


class StackedLinear(MegatronModule):
    """One linear projection with a bias for each of a process's experts.

    Args:
        out, width: numbers of outputs and of inputs on this rank.
        split: what expert tensor parallelism divides: 0 the outputs, 1 the inputs.

    Attributes:
        weight: [experts, in, out].
        bias: [experts, out].
    """

    def __init__(self, config: PolicyConfig, experts: int, out: int, width: int, split: int) -> None:
        super().__init__(config=config)
        self.experts = experts
        new = partial(torch.empty, dtype=config.params_dtype, device=device())
        self.weight = torch.nn.Parameter(new(experts, width, out))
        self.bias = torch.nn.Parameter(new(experts, out))
        # Megatron's gradient norm counts parameters without these marks on the first tensor-parallel rank only.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=2 - split, stride=1)
        if split == 0 or config.expert_tensor_parallel_size == 1:
            set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=1, stride=1)
        for parameter in (self.weight, self.bias):
            parameter.allreduce = has_dense_gradient(config)  # type: ignore[attr-defined]

    @property
    def stacked(self) -> Tensor:
        """The weight as [experts, out, in]."""
        return self.stack(self.weight)

    def stack(self, weight: Tensor) -> Tensor:
        """Return a tensor in the form of this layer's weight as [experts, out, in]."""
        return weight.transpose(1, 2)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Call `grouped_linear` with the experts' weights; the bias is not added."""
        return grouped_linear(x, self.stacked, ends)


class StackedExperts(MegatronModule):
    """The MLPs of this process's experts, with the interface of `GroupedExperts`."""

    def __init__(
        self, experts: int, config: PolicyConfig, pg_collection: ProcessGroupCollection, name: str | None = None
    ) -> None:
        super().__init__(config=config)
        mixture = config.mixture
        if mixture is None or mixture.clamped is None:
            raise ValueError("stacked experts need a clamped gate, but the model's `mixture` has none")
        self.experts, self._groups, self._gate = experts, pg_collection, mixture.clamped
        width = mixture.width // pg_collection.expt_tp.size()
        self.linear_fc1 = StackedLinear(config, experts, 2 * width, config.hidden_size, split=0)
        self.linear_fc2 = StackedLinear(config, experts, config.hidden_size, width, split=1)

    def forward(self, rows: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return the output [n, h] of the experts for rows [n, h] grouped by expert, biases included, times each row's
        probability; and None for a bias that is left to add."""
        ends = counts.cumsum(0, dtype=torch.int32)
        owners = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
        inner = clamped_gate(add_bias(self.linear_fc1(rows, ends), self.linear_fc1.bias, owners), self._gate)
        weighted = (inner * probs[:, None]).to(inner.dtype)
        bias: Tensor = self.linear_fc2.bias
        # The output is summed over ranks, so only the first adds the bias; the others add 0, with the bias's gradient.
        if self._groups.expt_tp.rank():
            bias = bias - bias.detach()
        return add_bias(self.linear_fc2(weighted, ends), bias, owners, probs), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the parameters as slices of those of all experts."""
        part, every = self._groups.ep.rank(), self._groups.ep.size()
        rank, ways = self._groups.expt_tp.rank(), self._groups.expt_tp.size()
        splits = {"linear_fc1.weight": 2, "linear_fc1.bias": 1, "linear_fc2.weight": 1, "linear_fc2.bias": None}
        state = {}
        for name, dim in splits.items():
            places = [(0, part, every)] if dim is None else [(0, part, every), (dim, rank, ways)]
            state[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{name}",
                self.get_parameter(name).data,
                *sharded_offsets,
                *((len(sharded_offsets) + axis, place, count) for axis, place, count in places),
                replica_id=(0, rank if dim is None else 0, self._groups.expt_dp.rank()),
                prepend_axis_num=len(sharded_offsets),
            )
        return state
