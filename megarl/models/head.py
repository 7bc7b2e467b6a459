"""The vocabulary head as one product, the same in training, scoring and decoding."""

from __future__ import annotations

import torch


def head_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits [n, V] of `hidden` [n, H] and `weight` [V, H], without autograd, see `wide_product`.

    Rounded to bf16, a logit of 20 is off by up to 0.06, and so is its log-prob.
    """
    return wide_product(hidden, weight.t())


def wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a @ b` of two matrices, without autograd.

    Of bf16 and fp16 operands a GPU returns its float32 sums as they are. A CPU has no such product and returns the
    operands' dtype.
    """
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)
