"""How products of queries and keys become the scores of the softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """How a model makes scores out of the products of queries and keys."""

    scale: float  # factor of the products
    sinks: Tensor | None = None  # [heads], further scores in the softmax, see sinks.py
    cap: float | None = None  # the soft cap after the factor, see capped.py; not together with sinks
