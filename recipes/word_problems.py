"""Generated word problems: rows for `data.train_files: [megarl.recipes.word_problems:make_rows]`, and answer pairs."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo")
_THINGS = ("apples", "books", "coins", "pens", "stamps", "cards", "shells", "keys")
POLITE = "You are welcome!"
_KINDS = ("sums", "differences", "products")


def _problem(kind: str, source: random.Random, most: int) -> tuple[str, int]:
    """Return a question and its answer, with all numbers at most `most`."""
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
    """Return distinct word problems with one calculation, split into training and held-out rows.

    Args:
        split: `train`, or `val` for the `held_out` problems which are never trained on.
        most: largest number in a problem or its answer.
        rows: problems for training.
        held_out: size of the `val` split.
        system: system message; empty: the default of the chat template.
        seed: seed of the problems.

    Returns:
        Rows with `messages`, `answer` ("42") and `data_source` (sums, differences, products).
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    source = random.Random(seed)
    problems: dict[str, dict[str, Any]] = {}
    tries = 0
    while len(problems) < rows + held_out:
        tries += 1
        if tries > 20 * (rows + held_out):
            raise ValueError(f"cannot make {rows + held_out} distinct problems with numbers up to {most}")
        kind = _KINDS[tries % len(_KINDS)]
        question, answer = _problem(kind, source, most)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        problems.setdefault(question, {"messages": messages, "answer": str(answer), "data_source": kind})
    every = list(problems.values())
    return every[:held_out] if split == "val" else every[held_out:]


def make_pairs(
    split: str = "train", most: int = 60, rows: int = 4000, held_out: int = 256, system: str = "", seed: int = 0
) -> list[dict[str, Any]]:
    """Return the problems of `make_rows` with an artificial preference for answers that end politely.

    Returns:
        Rows with `prompt`, `chosen` and `rejected` as messages (the assistant's: "Anna has 42 apples. You are welcome!"
        and "Anna has 42 apples."), `answer` and `data_source`.
    """
    pairs = []
    for row in make_rows(split, most, rows, held_out, system, seed):
        words = row["messages"][-1]["content"].split()
        things = words[words.index("many") + 1]
        plain = f"{words[0]} has {row['answer']} {things}."
        both = {"chosen": f"{plain} {POLITE}", "rejected": plain}
        responses = {key: [{"role": "assistant", "content": text}] for key, text in both.items()}
        pairs.append(
            {"prompt": row["messages"], **responses, "answer": row["answer"], "data_source": row["data_source"]}
        )
    return pairs


def polite(samples: list[dict[str, Any]]) -> list[float]:
    """Score 1 for each response that ends like the chosen responses of `make_pairs`, otherwise 0."""
    return [float(sample["response"].rstrip().endswith(POLITE)) for sample in samples]
