"""Token positions of a vision-language model: three numbers each, for time, height and width.

A text token has three equal numbers, one more than the token before it. The features of an image that begins at p have
(p, p + row, p + column), and text continues at p + max(rows, columns). Source: Qwen2-VL (Wang et al. 2024), 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: (index of the first feature in the sequence, rows, columns) of an image, in features.
Place = tuple[int, int, int]


def positions_of(tokens: int, images: Sequence[Place]) -> npt.NDArray[np.int64]:
    """Return the positions [3, tokens] of a sequence of `tokens` tokens with `images`, in order."""
    steps = np.ones(tokens, dtype=np.int64)
    offsets = np.zeros((3, tokens), dtype=np.int64)
    for start, rows, columns in images:
        span = slice(start, start + rows * columns)
        steps[span] = 0
        steps[span.stop - 1] = max(rows, columns)
        inside = np.arange(rows * columns)
        offsets[1, span], offsets[2, span] = inside // columns, inside % columns
    return offsets + np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(steps)[:-1]])


def next_position(tokens: int, images: Sequence[Place]) -> int:
    """Return the position of the token after a sequence of `tokens` tokens with `images`."""
    return tokens - sum(rows * columns - max(rows, columns) for _, rows, columns in images)
