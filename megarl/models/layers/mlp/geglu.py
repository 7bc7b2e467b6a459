"""GeGLU with the tanh approximation, from the gate and up halves of a projection to their gated product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable


class GeGLU(MegatronModule):
    """The activation gelu(gate) * up [..., width] of an `x` [..., 2 * width] that is gate and up side by side.

    It keeps only its input for the backward pass (Shazeer 2020, GLU Variants Improve Transformer).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

    def forward(self, x: Tensor) -> Tensor:
        """Return gelu(first half) * second half over the last dimension, in the dtype of `x`."""
        return _GeGLU.apply(x)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(first half) * second half over the last dimension: [..., 2f] -> [..., f]; without gradient."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gelu_mul(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        grad_gate, grad_up = dx.chunk(2, dim=-1)
        torch.mul(F.gelu(gate, approximate="tanh"), grad, out=grad_up)
        grad_gate.copy_(torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"))
        return dx
