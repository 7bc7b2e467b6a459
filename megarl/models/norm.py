"""RMSNorm for Megatron's module specs, with and without sequence parallelism."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.kernels import cpu, gpu

_BLOCK = 1 << 17  # elements of one block: half a megabyte in fp32, so that a block stays in a core's cache


class RMSNorm(torch.nn.Module):
    """The norm y = x / rms(x) * weight over the last dimension, or * (1 + weight) if the config has
    `layernorm_zero_centered_gamma`.

    Megatron's wrapper of torch's norm refuses sequence parallelism. This class marks the weight, so that Megatron sums
    its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps, self._zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `x`, same shape and dtype."""
        factor = zero_centered(self.weight) if self._zero_centered else self.weight
        kernels = gpu.layer_kernels(x)
        if kernels is not None and kernels.fits(x.shape[-1]):
            return _KernelRMSNorm.apply(x, factor, self.eps, kernels)
        if x.is_cuda:
            return rms_norm(x, factor, self.eps)
        return _RMSNorm.apply(x, factor, self.eps)


def zero_centered(weight: Tensor) -> Tensor:
    """Return 1 + weight in float32 or wider: rounded to bf16, it would lose the last bits of a small weight."""
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))


def rms_norm(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * factor in the dtype of `x`; `factor` may have a wider one, in which the product is
    computed."""
    return F.rms_norm(x.to(factor.dtype), (x.shape[-1],), factor, eps).to(x.dtype)


class _KernelRMSNorm(torch.autograd.Function):
    """RMSNorm by Triton kernels, which keep only x and the weight for the backward pass and round the gradient once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: ModuleType) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.kernels = eps, kernels
        return kernels.rms_norm(cpu.rows(x), weight, eps).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows = cpu.rows(x), cpu.rows(grad)
        dx, dweight = ctx.kernels.rms_norm_backward(*rows, weight, ctx.eps, of_weight=ctx.needs_input_grad[1])
        return dx.view(x.shape), dweight, None, None


class _RMSNorm(torch.autograd.Function):
    """RMSNorm on a CPU, where torch's own RMSNorm would pass over fp32 copies of the whole input many times.

    Only the input is kept for the gradient. With n = x / rms and a = dy * weight,
    dx = (a - n * mean(a * n)) / rms,  dweight = sum of dy * n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        kernels = cpu.kernels_for(x, x.shape[-1])
        if kernels is None:
            return rms_norm(x, weight, eps)
        return kernels.add_norm(cpu.rows(x), None, weight, eps).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        kernels = cpu.kernels_for(x, x.shape[-1])
        if kernels is None:
            dx, dweight = _blocked_backward(cpu.rows(x), cpu.rows(grad), weight, ctx.eps)
        else:
            dx, dweight = kernels.norm_backward(cpu.rows(x), cpu.rows(grad), weight, ctx.eps)
        return dx.view(x.shape), dweight.to(weight.dtype), None


def _blocked_backward(x: Tensor, grad: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight by torch operations on blocks of rows that fit in the cache, in fp32 or
    wider."""
    size = x.shape[-1]
    dx = torch.empty_like(x)
    exact = torch.promote_types(x.dtype, torch.float32)
    dweight, scale = torch.zeros(size, dtype=exact), weight.to(exact)
    rows = max(1, _BLOCK // size)
    for x_block, grad_block, dx_block in zip(*(t.split(rows) for t in (x, grad, dx)), strict=True):
        normed, upstream = x_block.to(exact), grad_block.to(exact)
        inverse = torch.linalg.vector_norm(normed, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        normed = normed * inverse
        product = upstream * normed
        dweight += product.sum(0)
        along = (product @ scale).div_(size).unsqueeze_(-1)
        dx_block.copy_(upstream.mul(scale).addcmul_(normed, along, value=-1).mul_(inverse))
    return dx, dweight
