"""Generated arithmetic: rows for `data.train_files: [megarl.recipes.arithmetic:make_rows]`, and pairs of answers."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_SOURCES = {"+": "sums", "-": "differences", "*": "products"}


def make_rows(
    split: str = "train",
    ops: Sequence[str] = ("+",),
    low: int = 10,
    high: int = 99,
    held_out: int = 512,
    seed: int = 0,
    shares: Mapping[str, float] | None = None,
) -> list[dict[str, str]]:
    """Return all expressions `a<op>b=` with low <= a, b <= high, split into training and held-out rows.

    Args:
        split: `train`, or `val` for the `held_out` expressions which are never trained on.
        ops: operators out of + - *.
        low: smallest operand.
        high: largest operand.
        held_out: size of the `val` split.
        seed: seed for the choice of held-out expressions and of expressions dropped by `shares`.
        shares: fraction of an operator's expressions that is kept, chosen at random; other operators keep all.

    Returns:
        Rows with `prompt` ("47+85="), `answer` ("132") and `data_source` (with several operators: sums, differences,
            products).
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    unknown = [op for op in ops if op not in OPERATORS]
    if unknown:
        raise ValueError(f"ops must be among {list(OPERATORS)}, not {unknown}")
    shares = shares or {}
    strange = {op: share for op, share in shares.items() if op not in ops or not 0 < share <= 1}
    if strange:
        raise ValueError(f"shares must map operators in {list(ops)} to numbers in (0, 1], not {strange}")
    numbers = range(low, high + 1)
    rows = []
    for op in ops:
        pairs = [(a, b) for a in numbers for b in numbers]
        if op in shares:
            pairs = random.Random(f"{seed}{op}").sample(pairs, round(shares[op] * len(pairs)))
        source = _SOURCES[op] if len(ops) > 1 else "arithmetic"
        rows += [
            {"prompt": f"{a}{op}{b}=", "answer": str(OPERATORS[op](a, b)), "data_source": source} for a, b in pairs
        ]
    if not 0 < held_out < len(rows):
        raise ValueError(f"held_out must be above 0 and below the {len(rows)} expressions, not {held_out}")
    random.Random(seed).shuffle(rows)
    return rows[:held_out] if split == "val" else rows[held_out:]


def make_pairs(
    split: str = "train", ops: Sequence[str] = ("+",), low: int = 10, high: int = 99, held_out: int = 512, seed: int = 0
) -> list[dict[str, str]]:
    """Return the expressions of `make_rows` with an artificial preference for results of four digits.

    Returns:
        Rows with `prompt` ("47+85="), `chosen` ("0132"), `rejected` ("132"), and `answer`, one of the two at random,
        for supervised fine-tuning before preference training.
    """
    rows = make_rows(split, ops, low, high, held_out, seed)
    tossed = random.Random(f"{seed}{split}")
    pairs = [(row["prompt"], f"{int(row['answer']):04d}", row["answer"]) for row in rows]
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected, "answer": tossed.choice([chosen, rejected])}
        for prompt, chosen, rejected in pairs
    ]
