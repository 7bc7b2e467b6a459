"""How products of queries and keys become the scores of the softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """How a model makes scores out of the products of queries and keys."""

    scale: float  # factor of the dot products
    sinks: Tensor | None = None  # [heads], one further score per head in the softmax's sum, which no key belongs to
    cap: float | None = None  # the soft cap after the factor: cap * tanh(score / cap); not together with sinks
