"""The vocabulary head as one product, the same in training, scoring and decoding."""

from __future__ import annotations

import torch
from torch import Tensor


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits [n, V] of `hidden` [n, H] and `weight` [V, H], without autograd. On a GPU, bf16 gives float32.

    In bf16, a logit of 20, and so its log-prob, would be off by up to 0.06.
    """
    return wide_product(hidden, weight.t())


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap) in at least float32; None: the logits as they are.

    Without autograd it may overwrite the logits.
    """
    if cap is None:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.tanh(wide / cap) * cap if wide.requires_grad else wide.div_(cap).tanh_().mul_(cap)


def cap_slope(logits: Tensor, cap: float) -> Tensor:
    """Return the derivative of `capped` where its results are `logits`, of which -inf stand for masked ones: 0."""
    return torch.square(logits / cap).neg_().add_(1).clamp_(min=0)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` of two matrices, without autograd.

    For bf16 and fp16 on a GPU the result is float32, without rounding the sums. A CPU has no such product and returns
    the operands' dtype.
    """
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)
