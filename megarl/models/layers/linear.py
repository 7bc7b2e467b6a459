"""Linear layers beside Megatron's: with a whole weight on every tensor-parallel rank, and with a bias."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megarl.system.device import device


class ReplicatedLinear(torch.nn.Module):
    """y = W x with a whole weight [out, in]; under sequence parallelism each rank computes its own tokens.

    The weight is marked, so that Megatron sums its gradient over the tensor-parallel ranks if they have different
    tokens.
    """

    bias = None
    tp_group = None

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.allreduce = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return W x [..., out] and, as Megatron's linear layers return a bias too, None."""
        return F.linear(x, self.weight), None


class ColumnsWithBias(ColumnParallelLinear):
    """Megatron's layer split by rows of its weight, with a bias whatever `add_bias_linear`, which is for all layers."""

    def __init__(self, *args: Any, bias: bool, **settings: Any) -> None:
        super().__init__(*args, bias=True, **settings)


class RowsWithBias(RowParallelLinear):
    """Megatron's layer split by columns of its weight, with a bias that is added once, not on every rank."""

    def __init__(self, *args: Any, bias: bool, **settings: Any) -> None:
        super().__init__(*args, bias=True, **settings)


def is_summed(linear: Any) -> bool:
    """Return whether the output of a linear layer is the sum of the outputs of the tensor-parallel ranks."""
    return isinstance(linear, RowParallelLinear)
