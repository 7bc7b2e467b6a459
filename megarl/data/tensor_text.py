"""Tensors as JSON values."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import torch
from torch import Tensor


def to_text(rows: Tensor | None) -> list[str | int] | None:
    """Return a tensor [n, width] as JSON values: dtype, width and base64 of the bytes; None stays None."""
    if rows is None:
        return None
    name = str(rows.dtype).removeprefix("torch.")
    return [name, rows.shape[1], base64.b64encode(rows.contiguous().numpy().tobytes()).decode()]


def from_text(values: Sequence[str | int] | None) -> Tensor | None:
    """Return the tensor from the JSON values that `to_text` returned; None stays None."""
    if values is None:
        return None
    name, width, text = values
    data, dtype = bytearray(base64.b64decode(str(text))), getattr(torch, str(name))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.zeros(0, dtype=dtype)
    return flat.view(-1, int(width))
