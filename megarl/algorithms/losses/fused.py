"""Losses whose kernel computes the derivative along with the loss, so that the backward pass is one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class WithSlope(torch.autograd.Function):
    """`WithSlope.apply(x, loss, slope)`: token losses that were computed from x already, with d loss / d x.

    The backward pass turns `slope` into the gradient in place, so it can run once, and it has no derivative itself.

    Raises:
        RuntimeError: a second backward pass, or one through the gradient (`create_graph=True`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, slope: Tensor) -> Tensor:
        """The loss as it is."""
        ctx.slope = slope
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x."""
        slope, ctx.slope = ctx.slope, None
        if slope is None:
            raise RuntimeError("a second backward pass through this loss: its derivative was used up by the first")
        return slope.mul_(grad), None, None
