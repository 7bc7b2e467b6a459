"""The clamped activation of gpt-oss's experts, from gates and ups in turns to their gated product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.models.layers.experts.plain import ClampedGate


def clamped_gate(x: Tensor, rule: ClampedGate) -> Tensor:
    """Apply `rule` to x [n, 2f], in which the columns of the gate and up projections alternate; return [n, f].

    The arithmetic is float32 or wider and rounded once. Only the input is kept for the backward pass.
    """
    return _ClampedGate.apply(x, rule)


class _ClampedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: ClampedGate) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rule = rule
        gate, up = _parts(x, rule)
        return ((up + 1) * gate * torch.sigmoid(rule.alpha * gate)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        rule: ClampedGate = ctx.rule
        gate, up = _parts(x, rule)
        chance = torch.sigmoid(rule.alpha * gate)
        slope = chance * (1 + rule.alpha * gate * (1 - chance))
        dx = torch.empty_like(x)
        dx[:, ::2] = (grad * (up + 1) * slope).masked_fill_(x[:, ::2] > rule.limit, 0)
        dx[:, 1::2] = (grad * gate * chance).masked_fill_(x[:, 1::2].abs() > rule.limit, 0)
        return dx, None


def _parts(x: Tensor, rule: ClampedGate) -> tuple[Tensor, Tensor]:
    """Return the clamped gates (even columns of `x`) and up projections (odd columns), [n, f] in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x[:, ::2].to(wide).clamp(max=rule.limit), x[:, 1::2].to(wide).clamp(-rule.limit, rule.limit)
