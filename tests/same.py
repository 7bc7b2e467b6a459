"""Equality of batches down to the bits, for tests that move them about."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.data.batch import Batch, Jagged


def same(a: Batch, b: Batch) -> bool:
    """Same samples, names, dtypes and bits; NaN equals NaN of the same bits."""
    return len(a) == len(b) and set(a.names()) == set(b.names()) and all(_same(a[name], b[name]) for name in a.names())


def _same(a: Tensor | Jagged | list, b: Tensor | Jagged | list) -> bool:
    if isinstance(a, Jagged) and isinstance(b, Jagged):
        return _same(a.offsets, b.offsets) and _same(a.values, b.values)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return isinstance(a, list) and repr(a) == repr(b)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
