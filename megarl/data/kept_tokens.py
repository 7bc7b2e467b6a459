"""Kept tokens: those from which each token was sampled, after top_k, top_p, min_p and min_new_tokens.

Training on samples of a filtered distribution divides by the probability of the tokens that the filters kept, so it
needs the same tokens, not those that another model's logits would keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.data.tensor_text import from_text, to_text


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """For consecutive tokens of a sample: the ids that top-k and top-p left to draw each of them from, end to end.

    A token with count 0 has no such record.
    """

    counts: Tensor  # int32 [n], number of kept ids of each token
    ids: Tensor  # int32 [sum of counts], the kept ids, token after token

    @classmethod
    def of(cls, rows: Tensor) -> KeptTokens:
        """Return the record of n tokens from `rows` [n, k], the ids that each was drawn from, filled up with -1."""
        is_kept = rows >= 0
        return cls(is_kept.sum(1, dtype=torch.int32), rows[is_kept].to(torch.int32))

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Return the records `parts` of consecutive tokens as one record."""
        return cls(torch.cat([part.counts for part in parts]), torch.cat([part.ids for part in parts]))

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> KeptTokens:
        """Return the record of some sampled tokens; `rows` has the kept ids of each."""
        flat = [token for row in rows for token in row]
        return cls(torch.tensor([len(row) for row in rows], dtype=torch.int32), torch.tensor(flat, dtype=torch.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def extended(self, tokens: int) -> KeptTokens:
        """Return the record extended to `tokens` tokens; the further tokens have no kept tokens."""
        return KeptTokens(torch.cat([self.counts, self.counts.new_zeros(tokens - len(self))]), self.ids)

    def first(self, tokens: int) -> KeptTokens:
        """Return the part of this record that belongs to the first `tokens` tokens."""
        counts = self.counts[:tokens]
        return KeptTokens(counts, self.ids[: int(counts.sum())])

    def padded(self) -> Tensor:
        """Return the ids as int64 [n, k], where k is the largest count; rows with fewer ids end with -1."""
        counts = self.counts.long()
        places = torch.arange(int(counts.max()) if len(counts) else 0)
        rows = torch.full((len(counts), len(places)), -1, dtype=torch.int64)
        rows[places < counts[:, None]] = self.ids.long()
        return rows

    def to_text(self) -> list[list[str | int] | None]:
        """Return this record as plain data for JSON, which `from_text` reads."""
        return [to_text(part[:, None]) for part in (self.counts, self.ids)]

    @classmethod
    def from_text(cls, values: Sequence[Sequence[str | int]]) -> KeptTokens:
        """Return the record from the JSON values that `to_text` returned."""
        parts = [part[:, 0] for value in values if (part := from_text(value)) is not None]
        return cls(*parts)
