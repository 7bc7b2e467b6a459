"""Arithmetic on the spot: rows for `data.train_files: [megarl.recipes.arithmetic:make_rows]`."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def make_rows(
    split: str = "train",
    ops: Sequence[str] = ("+",),
    low: int = 10,
    high: int = 99,
    held_out: int = 512,
    seed: int = 0,
) -> list[dict[str, str]]:
    """All expressions `a<op>b=` with low <= a, b <= high, split so that held-out ones are never trained on.

    Args:
        split: `train`, or `val` for the `held_out` expressions that training never sees.
        ops: operators out of + - *.
        low: smallest operand.
        high: largest operand.
        held_out: size of the `val` split.
        seed: decides which expressions are held out.

    Returns:
        Rows with `prompt` ("47+85="), `answer` ("132") and `data_source`.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    unknown = [op for op in ops if op not in OPERATORS]
    if unknown:
        raise ValueError(f"ops may hold {list(OPERATORS)}, not {unknown}")
    numbers = range(low, high + 1)
    rows = [
        {"prompt": f"{a}{op}{b}=", "answer": str(OPERATORS[op](a, b)), "data_source": "arithmetic"}
        for op in ops
        for a in numbers
        for b in numbers
    ]
    if not 0 < held_out < len(rows):
        raise ValueError(f"held_out must lie between 1 and {len(rows) - 1}, not {held_out}")
    random.Random(seed).shuffle(rows)
    return rows[:held_out] if split == "val" else rows[held_out:]
