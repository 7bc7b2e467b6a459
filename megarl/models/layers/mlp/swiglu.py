"""SwiGLU as one operation, from the gate and up halves of a projection to their gated product."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.kernels import cpu, gpu

_BLOCK = 1 << 19  # elements of one block of the input on a CPU: a megabyte in bf16, which stays in the cache


class SwiGLU(MegatronModule):
    """The activation silu(gate) * up [..., width] of an `x` [..., 2 * width] that is gate and up side by side.

    Megatron's unfused form adds an offset of zero, keeps two more activations and copies to join the halves' gradients;
    this one keeps only its input (Shazeer 2020, GLU Variants Improve Transformer).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the gated product, dtype of `x`; with `scale` float32 [n], multiply each row by its scale."""
        if scale is None:
            return _SwiGLU.apply(x)
        kernels = gpu.layer_kernels(x)
        if kernels is None:
            inner = _SwiGLU.apply(x)
            return (inner * scale[:, None]).to(inner.dtype)
        return _ScaledSwiGLU.apply(x, scale, kernels)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        on_gpu = gpu.layer_kernels(x)
        if on_gpu is not None:
            return on_gpu.swiglu(cpu.rows(x)).view(*x.shape[:-1], x.shape[-1] // 2)
        kernels = cpu.kernels_for(x, x.shape[-1] // 2)
        if kernels is not None:
            return kernels.silu_mul(cpu.rows(x)).view(*x.shape[:-1], x.shape[-1] // 2)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        for part, result in zip(_blocks(x), _blocks(out, like=x), strict=True):
            gate, up = part.chunk(2, dim=-1)
            torch.mul(F.silu(gate), up, out=result)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        on_gpu = gpu.layer_kernels(x)
        if on_gpu is not None:
            return on_gpu.swiglu_backward(cpu.rows(x), cpu.rows(grad)).view(x.shape)
        kernels = cpu.kernels_for(x, x.shape[-1] // 2)
        if kernels is not None:
            return kernels.silu_mul_backward(cpu.rows(x), cpu.rows(grad)).view(x.shape)
        dx = torch.empty_like(x)
        for part, upstream, result in zip(_blocks(x), _blocks(grad, like=x), _blocks(dx), strict=True):
            gate, up = part.chunk(2, dim=-1)
            grad_gate, grad_up = result.chunk(2, dim=-1)
            torch.mul(F.silu(gate), upstream, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(upstream * up, gate, grad_input=grad_gate)
        return dx


class _ScaledSwiGLU(torch.autograd.Function):
    """SwiGLU and scale by one Triton kernel, which keeps no product for the gradient and rounds once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, kernels: ModuleType) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.kernels = kernels
        return kernels.swiglu(cpu.rows(x), scale.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        dx, dscale = ctx.kernels.scaled_swiglu_backward(cpu.rows(x), cpu.rows(grad), scale.contiguous())
        return dx, dscale.to(scale.dtype), None


def _blocks(x: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split `x` into blocks of rows that fit a CPU core's cache (as many as for `like`); on a GPU into one block."""
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda or not len(rows):
        return (rows,)
    return rows.split(max(1, _BLOCK // (x if like is None else like).shape[-1]))
