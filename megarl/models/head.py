"""The vocabulary head as one product, the same in training, scoring and decoding."""

from __future__ import annotations

import torch
from torch import Tensor


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits [n, V] of `hidden` [n, H] and `weight` [V, H], without autograd. On a GPU, bf16 gives float32.

    In bf16, a logit of 20, and so its log-prob, would be off by up to 0.06.
    """
    return wide_product(hidden, weight.t())


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` of two matrices, without autograd.

    For bf16 and fp16 on a GPU the result is float32, without rounding the sums. A CPU has no such product and returns
    the operands' dtype.
    """
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)
