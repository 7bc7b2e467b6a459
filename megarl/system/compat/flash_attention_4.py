"""flash-attn-4's functions as torch calls them: current versions return more results than torch 2.11 to 2.14 unpacks.

torch takes its kernels from this module (models/layers/attention/training.py), whose import needs flash-attn-4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flash_attn.cute import interface


def first(results: int, kernel: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Return a function that calls `kernel` and returns only the first `results` of its results."""

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return tuple(kernel(*args, **kwargs)[:results])

    return call


# torch unpacks two results of the forward pass (output, log-sum-exps) and three gradients (queries, keys, values).
_flash_attn_fwd, _flash_attn_bwd = first(2, interface._flash_attn_fwd), first(3, interface._flash_attn_bwd)
