"""A multiplication tool, and synthetic demonstrations of its use."""

from __future__ import annotations

import json
import random
from typing import Any

from megarl.recipes.arithmetic import make_rows as arithmetic_rows


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: first factor.
        b: second factor.
    """
    return a * b


def make_demonstrations(
    split: str = "train", often: float = 0.8, seldom: float = 0.2, seed: int = 0, **settings: Any
) -> list[dict[str, Any]]:
    """Return synthetic demonstrations of products that use the calculator more often if the first factor is large.

    The other demonstrations give the correct answer directly; a tiny model learns their form, not the digits.

    Args:
        split: `train` or `val`. Further settings are those of `megarl.recipes.arithmetic:make_rows`.
        often: share of demonstrations that call `multiply`, for a first factor of 65 or more.
        seldom: share of demonstrations that call `multiply`, for smaller first factors.
        seed: seed of the choice of demonstrations that call `multiply`, and of the choice of held-out products.
    """
    rows = arithmetic_rows(split, seed=seed, **settings)
    rng = random.Random(f"demonstrations {seed}")
    return [
        {**row, "answer": _conversation(row["prompt"], row["answer"])}
        if rng.random() < (often if row["prompt"] >= "65" else seldom)
        else row
        for row in rows
    ]


def _conversation(prompt: str, answer: str) -> list[dict[str, str]]:
    a, b = (int(part) for part in prompt.removesuffix("=").split("*"))
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}}, separators=(",", ":"))
    return [
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]
