"""Positions of tokens of a vision-language model: three numbers each, time, height and width.

A token of text has three equal numbers, one more than the token before it. The features of an image that begins at p
have (p, p + row, p + column), and text goes on at p + max(rows, columns). Source: Qwen2-VL (Wang et al. 2024), 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def positions_of(
    tokens: npt.NDArray[np.int64], image_token: int, grids: Sequence[tuple[int, int]]
) -> npt.NDArray[np.int64]:
    """Return the positions [3, T] of a sequence of T tokens.

    Args:
        tokens: int64 [T]; an image's features stand one after another in the places of `image_token`.
        grids: rows and columns of features of each image, in order.

    Raises:
        ValueError: there are more or fewer image tokens than features.
    """
    visual = tokens == image_token
    if int(visual.sum()) != sum(rows * columns for rows, columns in grids):
        raise ValueError(f"{int(visual.sum())} image tokens for images of {[r * c for r, c in grids]} features")
    steps = np.ones(len(tokens), dtype=np.int64)
    found = np.zeros((3, len(tokens)), dtype=np.int64)
    at = 0
    places = np.flatnonzero(visual)
    for rows, columns in grids:
        own = places[at : at + rows * columns]
        if own[-1] - own[0] != len(own) - 1:
            raise ValueError(f"the {len(own)} tokens of an image do not stand one after another")
        steps[own] = 0
        steps[own[-1]] = max(rows, columns)
        inside = np.arange(rows * columns)
        found[1, own], found[2, own] = inside // columns, inside % columns
        at += len(own)
    begin = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(steps)[:-1]])
    return found + begin


def next_position(tokens: int, grids: Sequence[tuple[int, int]]) -> int:
    """Return the position of the token after a sequence of `tokens` tokens with these images."""
    return tokens - sum(rows * columns - max(rows, columns) for rows, columns in grids)
