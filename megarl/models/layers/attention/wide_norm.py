"""RMS norm of queries or keys over all heads together, before they are rotated (MiniMax-M2).

Tensor parallelism splits the heads, so the ranks add up their sums of squares: one number per token.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.models.config import PolicyConfig
from megarl.system.comm import WorkerGroup


class _SumOverRanks(torch.autograd.Function):
    """The sum over tensor-parallel ranks, each of which computes a part of the loss from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: WorkerGroup) -> Tensor:
        ctx.group = group
        return group.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad.clone()), None


def wide_norm(x: Tensor, squares: Tensor, weight: Tensor, width: int, eps: float) -> Tensor:
    """Return x / rms * weight of heads x [..., heads, d].

    Args:
        squares: [...], sum of squares of all ranks' heads, float32 or wider.
        weight: [heads * d].
        width: number of elements of all ranks' heads.
    """
    scale = (squares / width + eps).rsqrt()[..., None, None]
    return (x * scale).to(x.dtype) * weight.view(x.shape[-2:])


class WideNorm(MegatronModule):
    """RMS norm over all heads of all ranks together, of which this rank has some; replaces Megatron's norm per head.

    Args:
        hidden_size: width of a head.
        groups: whether the heads are those of keys.

    Attributes:
        weight: [heads of this rank * width].
    """

    def __init__(self, config: PolicyConfig, hidden_size: int, eps: float, *, groups: bool) -> None:
        super().__init__(config=config)
        heads = config.num_query_groups or 0 if groups else config.num_attention_heads
        tp = config.tensor_model_parallel_size
        self.eps, self._width = eps, heads * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self._width // tp, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self._group = None if tp == 1 else mpu.get_tensor_model_parallel_group()

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised heads, like `x` [t, 1, heads, d]."""
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = exact.square().sum((-2, -1))
        if self._group is not None:
            squares = _SumOverRanks.apply(squares, WorkerGroup("the tensor-parallel ranks", self._group, 600.0))
        return wide_norm(exact, squares, self.weight, self._width, self.eps).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight as a slice of that of all heads."""
        groups = {"tp_group": mpu.get_tensor_model_parallel_group(), "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)
