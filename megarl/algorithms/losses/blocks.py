"""Losses that look at one token at a time, evaluated in blocks that stay in a CPU's cache, with their slope at once.

A dozen passes over tensors as long as the batch are bound by memory, and autograd keeps most of them. Here every block
is read once, and its losses and their derivatives are written; the backward pass is one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_BLOCK_TOKENS = 1 << 15

#: Loss and statistics of a block from differentiable x and the other inputs, all [n]; works on any block.
General = Callable[..., tuple[Tensor, Tensor]]
#: Loss, d loss / d x and statistics; None where this block needs the general form.
Quick = Callable[..., tuple[Tensor, Tensor, Tensor] | None]


def by_blocks(
    general: General, quick: Quick, x: Tensor, others: Sequence[Tensor], mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Token losses in the shape of `mask`, differentiable in `x`, and the statistics [blocks, S] of all blocks.

    `general` and `quick` are called with x, the others, and (`general` only) the mask. `quick` is tried on a CPU where
    the mask hides nothing.
    """
    if mask.is_cuda:
        loss, stats = general(x, *others, mask)
        return loss, stats[None]
    return _Blocks.apply(x, others, mask, general, quick)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, others: Sequence[Tensor], mask: Tensor, general: General, quick: Quick
    ) -> tuple[Tensor, Tensor]:
        flat, flat_mask = x.detach().reshape(-1), mask.reshape(-1)
        flat_others = [other.detach().reshape(-1) for other in others]
        loss, slope, stats = torch.empty_like(flat), torch.empty_like(flat), []
        for start in range(0, max(len(flat), 1), _BLOCK_TOKENS):
            part = slice(start, start + _BLOCK_TOKENS)
            inputs = [flat[part], *(other[part] for other in flat_others)]
            here = flat_mask[part]
            done = quick(*inputs) if len(here) and bool(here.all()) else None
            loss[part], slope[part], numbers = done or _general(general, inputs, here)
            stats.append(numbers)
        ctx.save_for_backward(slope)
        numbers = torch.stack(stats)
        ctx.mark_non_differentiable(numbers)
        return loss.view(x.shape), numbers

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope.view(grad.shape), None, None, None, None


def _general(general: General, inputs: list[Tensor], mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        x = inputs[0].requires_grad_()
        loss, stats = general(x, *inputs[1:], mask)
        (slope,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), slope, stats


def where_zero(values: Tensor, gap: Tensor) -> Tensor:
    """`values` where `gap` (never positive) is zero, zero elsewhere."""
    # The derivative of a threshold does just this, several times faster than a comparison and torch.where.
    return torch.ops.aten.threshold_backward(values, gap, -torch.finfo(gap.dtype).tiny)
