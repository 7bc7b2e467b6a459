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
    """The decision of each of N packed tokens."""

    start: Tensor  # int64 [N], the first token of the token's decision; -1: the token belongs to none

    @classmethod
    def of(cls, starts: Tensor, offsets: Tensor) -> Decisions:
        """Return the decisions that begin at the tokens `starts`, bool [N]; each ends before the next one of its row.

        Args:
            offsets: int64 [B + 1], the first token of each row, and N. Tokens of a row before its first start belong
                to no decision.
        """
        places = torch.arange(len(starts), device=starts.device)
        latest = torch.where(starts, places, -1).cummax(0).values if len(starts) else places
        first = torch.repeat_interleave(offsets[:-1], offsets.diff())
        return cls(torch.where(latest >= first, latest, -1))

    def gather(self, values: Tensor) -> Tensor:
        """Sum the values [N] of each decision at its first token; zero elsewhere."""
        known = self.start >= 0
        return torch.zeros_like(values).index_add_(0, self.start[known], values[known])

    def spread(self, values: Tensor, mask: Tensor) -> Tensor:
        """Repeat the value of each decision's first token at its tokens in `mask`, bool [N]; zero elsewhere."""
        return torch.where(mask & (self.start >= 0), values[self.start.clamp(min=0)], 0)
