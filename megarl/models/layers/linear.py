"""A linear layer whose weight is whole on every tensor-parallel rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
        """Return W x [..., out], and no bias, like Megatron's linear layers."""
        return F.linear(x, self.weight), None
