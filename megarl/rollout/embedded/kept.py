"""Records which tokens the sampling filters kept for each sampled token (`megarl.data.kept_tokens`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.data.kept_tokens import KeptTokens
from megarl.models.layers.mesh import Mesh
from megarl.rollout.embedded.token_rows import TokenRows


class KeptRecord(TokenRows):
    """For each sampled token of each row of the KV cache, the ids among which it was sampled: those that the filters
    top_k, top_p and min_p kept.

    Args:
        slots: number of cache rows.
        tokens: maximum number of sampled tokens of a row.
        most: maximum number of ids that the filters keep for a sampled token (`top_k`).
        mesh: has the pipeline stages, of which the last one samples.
    """

    def __init__(self, slots: int, tokens: int, most: int, mesh: Mesh, device: torch.device) -> None:
        super().__init__(torch.full((slots, tokens, most), -1, dtype=torch.int32, device=device), -1)
        self._mesh = mesh

    @staticmethod
    def bytes_per_row(tokens: int, most: int) -> int:
        """Return the bytes of a row's record: for each of `tokens` positions up to `most` ids that sampling kept."""
        return 4 * tokens * most

    def read(self, rows: Sequence[int], tokens: Sequence[int]) -> list[KeptTokens]:
        """Return, for each of `rows`, the ids that the sampling filters kept for each of its first `tokens[i]` sampled
        tokens, on the host. Collective over the pipeline stages."""
        whole = self._mesh.from_last_stage(self._rows[list(rows), : max(tokens)].contiguous()).cpu()
        return [KeptTokens.of(row[:count]) for row, count in zip(whole, tokens, strict=True)]
