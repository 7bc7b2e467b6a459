"""The soft cap of attention scores and logits (Gemma): x becomes cap * tanh(x / cap)."""

from __future__ import annotations

import torch
from torch import Tensor


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap) in at least float32; with cap None return x itself.

    Without autograd it may overwrite x.
    """
    if cap is None:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.tanh(wide / cap) * cap if wide.requires_grad else wide.div_(cap).tanh_().mul_(cap)


def cap_slope(results: Tensor, cap: float) -> Tensor:
    """Return the derivative of `capped`, computed from its results; 0 where a result is -inf, a masked number."""
    return torch.square(results / cap).neg_().add_(1).clamp_(min=0)
