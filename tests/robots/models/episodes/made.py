"""Episodes made for tests: a bright square that moves along its row, and the robot's place as the state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.data.batch import Batch, Jagged
from megarl.robots.config import END_FRAMES, FRAMES


def moving_squares(lengths: Sequence[int], *, errors: Sequence[str] | None = None) -> Batch:
    """One episode for each number of policy calls, each in a row and with a background of its own."""
    drawn = torch.Generator().manual_seed(5)
    frames, states = [], []
    for calls in lengths:
        row, background = int(torch.randint(28, (), generator=drawn)), torch.randint(60, (), generator=drawn)
        pictures = torch.full((calls + 1, 32, 32, 3), int(background), dtype=torch.uint8)
        for point in range(calls + 1):
            column = 28 * point // calls
            pictures[point, row : row + 4, column : column + 4] = 255
        frames.append(pictures)
        states.append(torch.linspace(0, 1, calls + 1)[:, None] + torch.randn(calls + 1, 2, generator=drawn) / 10)
    tensors = {
        FRAMES + "top": Jagged.from_list([some[:-1] for some in frames]),
        END_FRAMES + "top": torch.stack([some[-1] for some in frames]),
        "states": Jagged.from_list([some[:-1] for some in states]),
        "end_state": torch.stack([some[-1] for some in states]),
    }
    return Batch(tensors, {"env_error": list(errors or [""] * len(lengths))}, size=len(lengths))
