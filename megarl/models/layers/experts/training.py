"""The experts of a layer on one process: token rows grouped by expert, multiplied by all experts at once.

    tokens -> a row for each expert of a token -> [all-to-all over ep, gather over etp, by expert] -> experts -> back

A row is a copy of a token on its way to one expert. Row counts stay on the device; only ranks that exchange rows read
them (once per layer), because an all-to-all needs sizes on the host. They travel there while rows are copied, so that
the device has work while the host waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.kernels import gpu
from megarl.models.layers.mlp.swiglu import SwiGLU
from megarl.models.rows import route_by_expert, route_of_slots
from megarl.system.device import HostCopy, device

_ALIGNED = 16  # `grouped_mm` needs rows whose bytes are a multiple of this


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row of `x` by the transposed weight of its group: [n, out], differentiable.

    In bf16 on compute capability 9.0 or 10.0 this is one kernel for all groups. Elsewhere torch multiplies group by
    group, and on a GPU waits for `ends`. Inputs that `grouped_mm` refuses (no rows, float64, rows whose bytes are not a
    multiple of 16) are multiplied group by group here.

    Args:
        x: [n, in], rows in the order of groups.
        weight: [groups, out, in].
        ends: int32 [groups], index after the last row of each group, on the device of `x`. Rows after the last group
            have undefined results and must get no gradient.
    """
    if len(x) and _is_aligned(weight, x.dtype) and x.dtype != torch.float64:
        transposed = weight.transpose(1, 2)
        # On compute capability 10 torch's kernel may leave the gradient of a group without rows undefined, so it is set
        # to 0 (pytorch/pytorch#172439).
        on_gpu = weight.device.type == "cuda"
        if transposed.requires_grad and on_gpu and torch.cuda.get_device_capability(weight.device)[0] == 10:
            empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            transposed.register_hook(lambda grad: grad.masked_fill(empty[:, None, None], 0))
        return F.grouped_mm(x, transposed, offs=ends)
    return group_by_group([partial(F.linear, weight=each) for each in weight], x, ends)


def is_one_kernel(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `grouped_linear` by a weight [groups, out, in] in `dtype` is one kernel without host waits."""
    if not weight.is_cuda or dtype != torch.bfloat16 or not _is_aligned(weight, dtype):
        return False
    return torch.cuda.get_device_capability(weight.device) in ((9, 0), (10, 0))


def _is_aligned(weight: Tensor, dtype: torch.dtype) -> bool:
    return all(size * dtype.itemsize % _ALIGNED == 0 for size in weight.shape[1:])


def group_by_group(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_linear` by one function per group, called even without rows; the host waits for `ends`."""
    stops = ends.tolist()
    parts = [product(x[a:b]) for product, a, b in zip(products, [0, *stops], stops, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - stops[-1], parts[0].shape[1])])


def has_dense_gradient(config: TransformerConfig) -> bool:
    """Return whether an expert's gradient is summed over the same ranks as that of a dense layer.

    That is so if expert parallelism and expert tensor parallelism divide experts in the way in which dense layers are
    divided.
    """
    alike = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
    return alike and config.expert_model_parallel_size == 1


class GroupedLinear(MegatronModule):
    """One linear projection for each of a process's experts, without bias.

    Args:
        split: dimension of an expert's weight that expert tensor parallelism divides.

    Attributes:
        weight: [experts * out, in], the experts' weights concatenated by rows.
    """

    def __init__(self, config: TransformerConfig, experts: int, out: int, width: int, split: int) -> None:
        super().__init__(config=config)
        self.experts = experts
        self.weight = torch.nn.Parameter(torch.empty(experts * out, width, dtype=config.params_dtype, device=device()))
        # The gradient norm and gradient buffers use these marks.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=split, stride=1)
        self.weight.allreduce = has_dense_gradient(config)  # type: ignore[attr-defined]

    @property
    def stacked(self) -> Tensor:
        """The weight as [experts, out, in]."""
        return self.stack(self.weight)

    def stack(self, weight: Tensor) -> Tensor:
        """Return a tensor that has the shape of this layer's weight as a view [experts, out, in]."""
        return weight.view(self.experts, -1, weight.shape[1])

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert's weight to the expert's rows of `x` (`grouped_linear`).

        On GPUs where `grouped_linear` is one kernel, the backward pass adds the weights' gradients directly to the
        float32 buffer that Megatron's data parallelism has for them (`main_grad`), without a gradient in bf16.
        """
        buffer = getattr(self.weight, "main_grad", None) if self.weight.requires_grad else None
        kernels = gpu.expert_kernels(x)
        if buffer is None or kernels is None or not len(x) or not is_one_kernel(self.stacked, x.dtype):
            return grouped_linear(x, self.stacked, ends)
        return _AddingLinear.apply(x, self.weight, ends, self.experts, kernels)


class _AddingLinear(torch.autograd.Function):
    """`grouped_linear` whose backward pass adds the weights' gradients to `main_grad`, as Megatron's layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, experts: int, kernels: ModuleType) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weight, ctx.experts, ctx.kernels = weight, experts, kernels
        stacked = weight.view(experts, -1, weight.shape[1])
        return F.grouped_mm(x, stacked.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        weight, grad = ctx.weight, grad.contiguous()
        shape = (ctx.experts, -1, weight.shape[1])
        of_x = F.grouped_mm(grad, weight.view(shape), offs=ends) if ctx.needs_input_grad[0] else None
        ctx.kernels.add_products(grad, x.contiguous(), ends, weight.main_grad.view(shape))
        weight.grad_added_to_main_grad = True
        # Megatron's hook on the weight runs only if there is a gradient. It ignores the values of this one, because
        # `grad_added_to_main_grad` is set.
        return of_x, torch.empty_like(weight), None, None, None


class GroupedExperts(MegatronModule):
    """The SwiGLU MLPs of this process's experts, with the interface that Megatron's MoELayer needs.

    Args:
        experts: number of experts of this process.
        pg_collection: process groups; `ep` distributes experts, `expt_tp` splits each expert.
        name: not used; megatron-core 0.19 passes the module's name.
    """

    linear: type[GroupedLinear] = GroupedLinear

    def __init__(
        self,
        experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        self.experts, self._groups = experts, pg_collection
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.linear_fc1 = self.linear(config, experts, 2 * width, config.hidden_size, split=0)
        self.activation = SwiGLU(config)
        self.linear_fc2 = self.linear(config, experts, config.hidden_size, width, split=1)

    def forward(self, rows: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return each row's expert output times its probability [n, h], and None for the bias.

        Args:
            rows: [n, h], grouped by expert.
            counts: integers [experts], rows of each expert, on the device of `rows`.
            probs: float32 [n], the router's weight of each row.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = self.activation(self.linear_fc1(rows, ends), probs)
        return self.linear_fc2(inner, ends), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensorFactory]:
        """Return the weights' slices of two whole tensors [all experts, out, in], gate before up projections.

        Names and slices are those of Megatron's SequentialMLP, which wrote older checkpoints.
        """
        first, every = self.experts * self._groups.ep.rank(), self.experts * self._groups.ep.size()
        rank, ways = self._groups.expt_tp.rank(), self._groups.expt_tp.size()
        axis = len(sharded_offsets)
        splits = {
            "linear_fc1": [(axis + 1, rank + half * ways, 2 * ways) for half in (0, 1)],
            "linear_fc2": [(axis + 2, rank, ways)],
        }

        def factory(name: str) -> ShardedTensorFactory:
            split = splits[name]

            def build(key: str, weight: Tensor, replica: ReplicaId, _: slice | None) -> list[ShardedTensor]:
                blocks = weight.view(self.experts * len(split), -1, weight.shape[1])
                return [
                    ShardedTensor.from_rank_offsets(
                        key,
                        block,
                        *sharded_offsets,
                        (axis, first + number // len(split), every),
                        split[number % len(split)],
                        replica_id=replica,
                        prepend_axis_num=axis + 1,
                    )
                    for number, block in enumerate(blocks)
                ]

            weight, replica = getattr(self, name).weight, (0, 0, self._groups.expt_dp.rank())
            return ShardedTensorFactory(f"{prefix}experts.{name}.weight", weight.data, build, torch.cat, replica)

        return {f"{prefix}{name}.weight": factory(name) for name in splits}


class TokenDispatcher(MoETokenDispatcher):
    """Sends tokens to their experts by all-to-alls and sums the results; Megatron's MoELayer calls the methods in
    order.

    Args:
        experts: number of experts of this process.
    """

    def __init__(self, experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._experts, self._first = experts, experts * pg_collection.ep.rank()
        self._alone = self.ep_size * self.tp_size == 1

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [n * k, h] grouped by expert, and their probabilities.

        Args:
            tokens: [s, b, h] of n tokens.
            routing_map: bool [n, experts], k in each row.
            probs: float32 [n, experts].
        """
        self._shape, self._counts = tokens.shape, routing_map.sum(0)
        if not self._alone:
            self._exchange_counts(self._counts)
        tokens = tokens.view(-1, tokens.shape[-1])
        each = self.config.moe_router_topk
        experts, owners = torch.nonzero_static(routing_map.T, size=len(tokens) * each).unbind(1)
        chosen = probs.view(-1).gather(0, owners * probs.shape[1] + experts)
        self._route = route_by_expert(owners, routing_map, each, tokens)
        return self._route.spread(tokens), chosen

    def token_dispatch(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange rows over the expert-parallel ranks."""
        if self._alone:
            return rows, probs
        numbers = self._sizes.tolist()  # here the host waits until the device has sent the sizes
        self._sent, self._received = numbers[: self.ep_size], numbers[self.ep_size : 2 * self.ep_size]
        self._gathered = numbers[2 * self.ep_size :]
        sizes = (self._received, self._sent)
        return all_to_all(self.ep_group, rows, *sizes), all_to_all(self.ep_group, probs, *sizes)

    def _exchange_counts(self, counts: Tensor) -> None:
        """Gather how many rows each rank sends to each expert, and start to copy the resulting split sizes to the host.

        Args:
            counts: int64 [all experts], number of this rank's rows for each expert.
        """
        # The ranks of the group are ordered [ep, etp], so the gathered counts are [ep, etp, all experts].
        every = gather_from_sequence_parallel_region(counts, group=self.tp_ep_group)
        arriving = every.view(self.ep_size, self.tp_size, -1)[:, :, self._first : self._first + self._experts]
        self._held = arriving.transpose(0, 1)  # [etp, ep, experts]: received rows come in this order
        sizes = [counts.view(self.ep_size, -1).sum(1), self._held[self.tp_rank].sum(1), self._held.sum((1, 2))]
        self._sizes = HostCopy(torch.cat(sizes))

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the received rows grouped by expert, the number of rows of each expert, and their probabilities."""
        if self._alone:
            return rows, self._counts, probs
        if self.tp_size > 1:
            rows, probs = (
                gather_from_sequence_parallel_region(part, group=self.tp_group, output_split_sizes=self._gathered)
                for part in (rows, probs)
            )
        experts = torch.arange(self._experts, device=rows.device).expand(self._held.shape).flatten()
        owners = experts.repeat_interleave(self._held.flatten(), output_size=len(rows))
        order = owners.argsort(stable=True)
        self._sorting = route_of_slots(order, len(rows), 1, rows)
        counts = self._held.sum((0, 1))
        return self._sorting.spread(rows), counts, probs.index_select(0, order)

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Restore the order in which rows arrived, and sum their parts over expert-tensor-parallel ranks."""
        if self._alone:
            return rows
        rows = self._sorting.inverse().spread(rows)
        if self.tp_size == 1:
            return rows
        exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
        whole = reduce_scatter_to_sequence_parallel_region(exact, group=self.tp_group, input_split_sizes=self._gathered)
        return whole.to(rows.dtype)

    def token_combine(self, rows: Tensor) -> Tensor:
        """Return rows to the processes that sent them."""
        return rows if self._alone else all_to_all(self.ep_group, rows, self._sent, self._received)

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Sum the rows of each token, [s, b, h]."""
        return self._route.collect(rows, self._shape[:-1].numel()).view(self._shape)


def expert_groups() -> ProcessGroupCollection:
    """Return the expert process groups of Megatron's parallel state."""
    groups = ProcessGroupCollection()
    groups.ep, groups.expt_tp = mpu.get_expert_model_parallel_group(), mpu.get_expert_tensor_parallel_group()
    groups.expt_dp = mpu.get_expert_data_parallel_group()
    groups.tp_ep = mpu.get_expert_tensor_and_model_parallel_group()
    return groups
