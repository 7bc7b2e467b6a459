"""Rows for environments that make their tasks from a seed: `data.train_files: [megarl.envs.seeds:rows]`."""

from __future__ import annotations

from typing import Any


def rows(split: str = "train", size: int = 1000, val_size: int = 50, seed: int = 0) -> list[dict[str, Any]]:
    """Return one row per seed.

    Args:
        split: `train`, or `val` for the held-out seeds.
        size: seeds for training: `seed` and those after it.
        val_size: held-out seeds, which follow those for training.

    Returns:
        Rows with `prompt` (the seed as text, which the environment's first observation replaces) and `seed`.
    """
    first, count = (seed, size) if split == "train" else (seed + size, val_size)
    return [{"prompt": str(number), "seed": number} for number in range(first, first + count)]
