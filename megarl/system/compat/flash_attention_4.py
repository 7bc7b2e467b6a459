"""flash-attn-4's functions as torch calls them: current versions return more results than torch 2.11 to 2.14 unpacks.

torch takes its kernels from this module (models/layers/attention/training.py), whose import needs flash-attn-4.
"""

from __future__ import annotations

from typing import Any

from flash_attn.cute import interface


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the output and the log-sum-exps."""
    return tuple(interface._flash_attn_fwd(*args, **kwargs)[:2])


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the gradients of queries, keys and values."""
    return tuple(interface._flash_attn_bwd(*args, **kwargs)[:3])
