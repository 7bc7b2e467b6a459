"""GSM8K's calculator annotations as a task: `<<48/2=24>>` becomes the prompt `48/2=` with the answer `24`.

Rows for `data.train_files: [megarl.recipes.gsm8k_calc:make_rows]`. Validation expressions come from GSM8K's test file
and leave out every expression that training contains.
"""

from __future__ import annotations

import random
import re

from megarl.data.sources import load_rows

ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
EXPRESSION = re.compile(r"[0-9.+\-*/()]+")
NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)")


def expressions(source: str) -> dict[str, str]:
    """Expression -> value over all annotations of one GSM8K source; blanks removed, non-numeric ones left out."""
    found: dict[str, str] = {}
    for row in load_rows(source):
        for expression, value in ANNOTATION.findall(row["answer"]):
            expression, value = expression.replace(" ", ""), value.replace(" ", "").replace(",", "")
            if EXPRESSION.fullmatch(expression) and NUMBER.fullmatch(value):
                found.setdefault(expression, value)
    return found


def make_rows(
    split: str = "train",
    train: str = "openai/gsm8k:main@train",
    test: str = "openai/gsm8k:main@test",
    max_chars: int = 16,
    limit: int | None = None,
    seed: int = 0,
) -> list[dict[str, str]]:
    """Distinct expressions of the training file (`train`), or of the test file without those (`val`).

    Args:
        split: `train` or `val`.
        train: GSM8K's training data: any source form of `data.train_files`.
        test: GSM8K's test data.
        max_chars: longer expressions are left out.
        limit: keep this many rows after shuffling.
        seed: of the shuffle.

    Returns:
        Rows with `prompt` ("48/2="), `answer` ("24") and `data_source`.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    seen = expressions(train)
    chosen = seen if split == "train" else {e: v for e, v in expressions(test).items() if e not in seen}
    rows = [
        {"prompt": f"{e}=", "answer": v, "data_source": "gsm8k_calc"} for e, v in chosen.items() if len(e) <= max_chars
    ]
    random.Random(seed).shuffle(rows)
    return rows[:limit]


SHAPES = {"a+b": 22, "a-b": 20, "a*b": 25, "a/b": 14, "a+b+c": 10, "a*b*c": 3, "a-b-c": 3, "a*b/c": 3}
DIGITS = (1, 1, 1, 2, 2, 2, 2, 3, 3, 4)


def make_sft_rows(
    split: str = "train",
    train: str = "openai/gsm8k:main@train",
    test: str = "openai/gsm8k:main@test",
    max_chars: int = 16,
    seed: int = 0,
) -> list[dict[str, str]]:
    """Rows for a cold start: the training expressions, and 100,000 invented ones of the same shapes.

    No held-out expression is among them.

    Args:
        split: `train`; a cold start has no validation rows of its own.
        train: GSM8K's training data.
        test: GSM8K's test data, whose expressions are left out.
        max_chars: longer expressions are left out.
        seed: of the invented expressions.
    """
    if split != "train":
        raise ValueError(f"split must be 'train', not {split!r}")
    real = make_rows("train", train, test, max_chars)
    held_out = {row["prompt"] for row in make_rows("val", train, test, max_chars)}
    draw = random.Random(seed)
    rows = {row["prompt"]: row for row in real}
    while len(rows) < len(real) + 100_000:
        prompt, answer = _invent(draw)
        if prompt not in held_out and len(prompt) <= max_chars + 1:
            rows.setdefault(prompt, {"prompt": prompt, "answer": answer, "data_source": "invented"})
    return list(rows.values())


def _invent(draw: random.Random) -> tuple[str, str]:
    """A random expression with a whole, non-negative value: ("12*7=", "84")."""
    shape = draw.choices(list(SHAPES), list(SHAPES.values()))[0]
    a, b, c = (draw.randrange(1, 10 ** draw.choice(DIGITS)) for _ in range(3))
    if "/" in shape:
        b, c = b % 100 + 1, c % 100 + 1
        a = b * (a % 200) if shape == "a/b" else a
        if shape == "a*b/c":
            a *= c
    if "-" in shape:
        a += b + (c if shape == "a-b-c" else 0)
    values = {"a": a, "b": b, "c": c}
    text = "".join(str(values.get(symbol, symbol)) for symbol in shape)
    value = {
        "a+b": a + b,
        "a-b": a - b,
        "a*b": a * b,
        "a/b": a // b,
        "a+b+c": a + b + c,
        "a*b*c": a * b * c,
        "a-b-c": a - b - c,
        "a*b/c": a * b // c,
    }[shape]
    return f"{text}=", str(value)
