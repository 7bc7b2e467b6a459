"""Records which tokens the sampling filters kept for each sampled token (`megarl.data.kept_tokens`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.data.kept_tokens import KeptTokens
from megarl.models.layers.mesh import Mesh


class KeptRecord:
    """The kept tokens of each cache row, which are copied with the row (a `Store` without cached positions).

    Args:
        slots: number of cache rows.
        tokens: maximum number of sampled tokens of a row.
        most: maximum number of kept tokens of a sampled token (`top_k`).
        mesh: has the pipeline stages, of which the last one samples.
    """

    length = 0

    def __init__(self, slots: int, tokens: int, most: int, mesh: Mesh, device: torch.device) -> None:
        self._rows = torch.full((slots, tokens, most), -1, dtype=torch.int32, device=device)
        self._mesh = mesh

    @staticmethod
    def bytes_per_row(tokens: int, most: int) -> int:
        """Return the bytes that one row needs."""
        return 4 * tokens * most

    def reserve(self, rows: int, needed: int) -> None:
        """Implement `Store.reserve`: all tokens are allocated."""

    def clear(self, rows: Tensor) -> None:
        """Implement `Store.clear`: tokens are read only after they are recorded."""

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Implement `Store.copy_rows`."""
        self._rows[targets] = self._rows[sources]

    def append(self, index: Tensor, kept: Tensor) -> None:
        """Record `kept`, int [n, most], for the tokens number `index` [n] of the first n rows."""
        self._rows[torch.arange(len(index), device=index.device), index] = kept.to(torch.int32)

    def read(self, rows: Sequence[int], tokens: Sequence[int]) -> list[KeptTokens]:
        """Return those of the first `tokens` tokens of `rows`, on the host; collective over the pipeline stages."""
        whole = self._mesh.from_last_stage(self._rows[list(rows), : max(tokens)].contiguous()).cpu()
        return [KeptTokens.of(row[:count]) for row, count in zip(whole, tokens, strict=True)]
