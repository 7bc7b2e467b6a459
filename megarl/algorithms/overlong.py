"""Soft penalty on the score of responses near the length limit (DAPO)."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Compute min(-(exceed / buffer) * factor, 0), where exceed = length - (max_length - buffer); add it to the score.

    Args:
        lengths: int [B], response tokens.
        max_length: length limit in tokens.
        buffer: tokens of the penalty zone below the limit.
        factor: penalty at the limit.

    Returns:
        float32 [B], 0 or negative.

    Raises:
        ValueError: the zone is empty or longer than the limit.

    Source: DAPO (arXiv 2503.14476), equation 13.

    >>> import torch
    >>> overlong_penalty(torch.tensor([90, 95, 100]), max_length=100, buffer=20)
    tensor([-0.5000, -0.7500, -1.0000])
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be between 1 and max_length = {max_length}, not {buffer}")
    exceed = lengths.float() - (max_length - buffer)
    return (-(exceed / buffer) * factor).clamp(max=0)
