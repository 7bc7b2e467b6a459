"""A draw without replacement by weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def weighted_draw(weights: ArrayLike, number: int, generator: np.random.Generator) -> list[int]:
    """Draw up to `number` places of `weights`, without replacement; return them in the order of the draw.

    Args:
        weights: [n], each above 0. The chance of a place among those that are left is proportional to its weight.
    """
    # The largest values of log(weight) + Gumbel noise are a draw without replacement by weight.
    logs = np.log(weights)
    return np.argsort(-(logs + generator.gumbel(size=len(logs))), kind="stable")[:number].tolist()
