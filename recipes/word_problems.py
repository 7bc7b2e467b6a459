"""Generated word problems: rows for `data.train_files: [megarl.recipes.word_problems:make_rows]`."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo")
_THINGS = ("apples", "books", "coins", "pens", "stamps", "cards", "shells", "keys")
_KINDS = ("sums", "differences", "products")


def _problem(kind: str, source: random.Random, most: int) -> tuple[str, int]:
    """Return a question and its answer; all numbers in them are at most `most`."""
    name, things = source.choice(_NAMES), source.choice(_THINGS)
    if kind == "products":
        a = source.randint(2, int(most**0.5))
        b = source.randint(2, min(9, most // a))
        return f"{name} has {a} boxes with {b} {things} in each. How many {things} does {name} have?", a * b
    large = source.randint(4, most)
    small = source.randint(2, large - 2)
    if kind == "sums":
        question = f"{name} has {small} {things} and buys {large - small} more. How many {things} does {name} have now?"
        return question, large
    question = f"{name} has {large} {things} and gives {small} of them away. How many {things} are left?"
    return question, large - small


def make_rows(
    split: str = "train", most: int = 60, rows: int = 4000, held_out: int = 256, system: str = "", seed: int = 0
) -> list[dict[str, Any]]:
    """Return distinct word problems of one calculation; held-out ones are never trained on.

    Args:
        split: `train`, or `val` for the `held_out` problems that training never sees.
        most: largest number in a problem or its answer.
        rows: problems for training.
        held_out: size of the `val` split.
        system: system message; empty: the chat template's own.
        seed: of the problems.

    Returns:
        Rows with `messages`, `answer` ("42") and `data_source` (sums, differences, products).
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    source = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    tries = 0
    while len(found) < rows + held_out:
        tries += 1
        if tries > 20 * (rows + held_out):
            raise ValueError(f"there are no {rows + held_out} distinct problems with numbers up to {most}")
        kind = _KINDS[tries % len(_KINDS)]
        question, answer = _problem(kind, source, most)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        found.setdefault(question, {"messages": messages, "answer": str(answer), "data_source": kind})
    every = list(found.values())
    return every[:held_out] if split == "val" else every[held_out:]
