"""Decisions of several tokens, such as all actions of a robot's policy call, with one critic's value each.

    start of a decision    1 0 0   1 0 0   1 0 0
    token rewards          . . r   . . s   . . t   ->   r . .   s . .   t . .     `gather`
    estimate               A . .   B . .   C . .   ->   A A A   B B B   C C C     `spread`

An estimator that sees the starts as its mask then goes from decision to decision instead of from token to token.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.algorithms.lazy import Tensor, torch


@dataclass(frozen=True)
class Decisions:
    """Which decision each of N packed tokens belongs to; a decision is a span of tokens that share a critic's value."""

    start: Tensor  # int64 [N], index of the first token of each token's decision; -1: the token is in no decision

    @classmethod
    def of(cls, starts: Tensor, offsets: Tensor) -> Decisions:
        """Return the decisions of N packed tokens. Each decision lasts until the next start or the end of its row.

        Args:
            starts: bool [N], whether a decision begins at the token. Tokens before the first start of a row are in no
                decision.
            offsets: int64 [B + 1], index of the first token of each row, and N at the end.
        """
        places = torch.arange(len(starts), device=starts.device)
        latest = torch.where(starts, places, -1).cummax(0).values if len(starts) else places
        first = torch.repeat_interleave(offsets[:-1], offsets.diff())
        return cls(torch.where(latest >= first, latest, -1))

    def gather(self, values: Tensor) -> Tensor:
        """Return [N]: at the first token of a decision (a span of tokens) the sum of its `values` [N], elsewhere 0."""
        known = self.start >= 0
        return torch.zeros_like(values).index_add_(0, self.start[known], values[known])

    def spread(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return [N] with the value of a decision's first token at each of its tokens where `mask`, bool [N], is true,
        and 0 elsewhere."""
        return torch.where(mask & (self.start >= 0), values[self.start.clamp(min=0)], 0)
