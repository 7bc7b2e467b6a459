"""Positions of tokens of a vision-language model: three numbers each, time, height and width.

A token of text has three equal numbers, one more than the token before it. The features of an image that begins at p
have (p, p + row, p + column), and text goes on at p + max(rows, columns). Source: Qwen2-VL (Wang et al. 2024), 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Place of the first feature in the sequence, rows and columns of features.
Place = tuple[int, int, int]


def positions_of(tokens: int, images: Sequence[Place]) -> npt.NDArray[np.int64]:
    """Return the positions [3, T] of a sequence of T `tokens` with these images, in order."""
    steps = np.ones(tokens, dtype=np.int64)
    found = np.zeros((3, tokens), dtype=np.int64)
    for start, rows, columns in images:
        own = slice(start, start + rows * columns)
        steps[own] = 0
        steps[own.stop - 1] = max(rows, columns)
        inside = np.arange(rows * columns)
        found[1, own], found[2, own] = inside // columns, inside % columns
    return found + np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(steps)[:-1]])


def next_position(tokens: int, images: Sequence[Place]) -> int:
    """Return the position of the token after a sequence of `tokens` tokens with these images."""
    return tokens - sum(rows * columns - max(rows, columns) for _, rows, columns in images)
