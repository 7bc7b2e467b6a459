"""Context parallelism of layers with states: ranks exchange tokens for heads, so each rank reads whole sequences.

    its tokens, all heads [t, n * w]   --heads_for_tokens-->   all tokens in order, 1 / n of the heads [T, w]
                          [t, n * w]   <--tokens_for_heads--   [T, w]

Shapes: n context-parallel ranks; T = n * t tokens of the padded stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.models.layers.gated_delta.rule import take_rows
from megarl.models.packing import PackedSequences, inverse_order, places_on_ranks


@dataclass(frozen=True)
class Exchange:
    """Swaps tokens for heads between the context-parallel ranks `group` that share one packed stream.

    Attributes:
        places: int64 [T], index of each token of the stream in the concatenation of all ranks' tokens.
        order: int64 [T], the inverse of `places`.
    """

    group: ProcessGroup
    places: Tensor
    order: Tensor

    @classmethod
    def of(cls, packed: PackedSequences, group: ProcessGroup, where: torch.device) -> Exchange:
        """Return the exchange of a packed stream between context-parallel ranks, with its indices on `where`.

        It is created once per stream, and kept in the stream's cache for all layers.
        """
        exchange: Exchange | None = packed.cache.get("exchange")
        if exchange is None:
            places = places_on_ranks(packed.lengths, packed.cp_size)
            exchange = packed.cache["exchange"] = cls(group, places.to(where), inverse_order(places).to(where))
        return exchange

    def heads_for_tokens(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's share [T, width / n] of the columns of each of `parts` [t, width], for all tokens in
        order."""
        ranks = self.group.size()
        columns = [part.unflatten(1, (ranks, -1)) for part in parts]
        sent = torch.cat(columns, -1).transpose(0, 1)  # [receiving rank, t, columns]
        received = all_to_all(self.group, sent).flatten(0, 1)
        return list(take_rows(received, self.places, self.order).split([part.shape[-1] for part in columns], -1))

    def tokens_for_heads(self, x: Tensor) -> Tensor:
        """Undo `heads_for_tokens`: exchange `x` [T, width], this rank's share of the columns for all tokens, for all
        columns of this rank's tokens, [t, n * width]."""
        sent = take_rows(x, self.order, self.places).unflatten(0, (self.group.size(), -1))
        return all_to_all(self.group, sent).transpose(0, 1).flatten(1)

    def share(self, weight: Tensor, sections: Sequence[int]) -> Tensor:
        """Return this rank's share of the rows of each of the sections of `weight`, as `heads_for_tokens` divides
        columns."""
        ranks, rank = self.group.size(), self.group.rank()
        return torch.cat([part.chunk(ranks)[rank] for part in weight.split(list(sections))])
