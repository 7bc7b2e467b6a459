"""Losses whose kernel computes the derivative along with the loss, so that the backward pass is one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WithSlope(torch.autograd.Function):
    """`WithSlope.apply(x, loss, slope)`: token losses that were computed from x already, with d loss / d x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None
