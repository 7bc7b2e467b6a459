"""A record of numbers for each token of a session's samples."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenRows:
    """Integers of each token of the running samples, such as routes or kept token ids; one row per sample.

    The rows are cleared and copied together with those of the key/value cache, so this class has the methods of a
    `megarl.models.layers.passes.Store`.

    Args:
        rows: [slots, tokens, width], integers.
        none: the number at places where nothing is recorded.
    """

    length = 0

    def __init__(self, rows: Tensor, none: int) -> None:
        self._rows, self._none = rows, none

    def reserve(self, rows: int, needed: int) -> None:
        """Do nothing, because memory for all tokens is allocated from the start."""

    def clear(self, rows: Tensor) -> None:
        """Set all recorded numbers of `rows` to `none`, the mark for an empty record."""
        self._rows[rows] = self._none

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` to `targets`; all rows are read before any row is written."""
        self._rows[targets] = self._rows[sources]

    def append(self, index: Tensor, numbers: Tensor) -> None:
        """Record `numbers` [n, width] for the tokens number `index` [n] of the first n rows."""
        self._rows[torch.arange(len(index), device=index.device), index] = numbers.to(self._rows.dtype)
