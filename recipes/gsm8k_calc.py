"""GSM8K's calculator annotations as a task: `<<48/2=24>>` becomes the prompt `48/2=` with the answer `24`.

Rows for `data.train_files: [megarl.recipes.gsm8k_calc:make_rows]`. Validation expressions come from GSM8K's test file,
without those in the training file. `make_sft_rows` adds synthetic expressions for a cold start.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

from megarl.data.sources import load_rows

ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
EXPRESSION = re.compile(r"[0-9.+\-*/()]+")
NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
OPERAND = re.compile(r"\d+\.?\d*|\.\d+")


def expressions(source: str) -> dict[str, str]:
    """Return {expression: value} of all calculator annotations in GSM8K's data `source`, without spaces."""
    values: dict[str, str] = {}
    for row in load_rows(source):
        for expression, value in ANNOTATION.findall(row["answer"]):
            expression, value = expression.replace(" ", ""), value.replace(" ", "").replace(",", "")
            if EXPRESSION.fullmatch(expression) and NUMBER.fullmatch(value):
                values.setdefault(expression, value)
    return values


def make_rows(
    split: str = "train",
    train: str = "openai/gsm8k:main@train",
    test: str = "openai/gsm8k:main@test",
    max_chars: int = 16,
    limit: int | None = None,
    seed: int = 0,
) -> list[dict[str, str]]:
    """Return the distinct expressions of the training file (`train`), or of the test file without these (`val`).

    Args:
        split: `train` or `val`.
        train: GSM8K's training data, in any form that `data.train_files` accepts.
        test: GSM8K's test data.
        max_chars: longer expressions are dropped.
        limit: number of rows to keep after shuffling.
        seed: seed of the shuffle.

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


def make_sft_rows(
    split: str = "train",
    train: str = "openai/gsm8k:main@train",
    test: str = "openai/gsm8k:main@test",
    max_chars: int = 16,
    invented: int = 200_000,
    seed: int = 0,
) -> list[dict[str, str]]:
    """Return rows for a cold start: the training expressions, and similar synthetic ones, without held-out expressions.

    Args:
        split: `train`; a cold start has no validation rows.
        train: GSM8K's training data.
        test: GSM8K's test data, whose expressions are excluded.
        max_chars: longer expressions are dropped.
        invented: number of distinct synthetic expressions.
        seed: seed of the synthetic expressions.
    """
    if split != "train":
        raise ValueError(f"split must be 'train', not {split!r}")
    rows = {row["prompt"]: row for row in make_rows("train", train, test, max_chars)}
    total = len(rows) + invented
    held_out = {row["prompt"] for row in make_rows("val", train, test, max_chars)}
    for expression in invent([prompt[:-1] for prompt in rows], random.Random(seed)):
        prompt = f"{expression}="
        if len(expression) > max_chars or prompt in held_out or prompt in rows:
            continue
        value = evaluate(expression)
        if value is not None:
            rows[prompt] = {"prompt": prompt, "answer": value, "data_source": "invented"}
        if len(rows) == total:
            break
    return list(rows.values())


def invent(real: list[str], draw: random.Random) -> Iterator[str]:
    """Yield synthetic expressions for a cold start, without end. Each has the form of a real expression, with numbers
    from others."""
    operands: dict[tuple[str, int], list[str]] = defaultdict(list)
    shapes = [OPERAND.sub("{}", expression) for expression in real]
    for shape, expression in zip(shapes, real, strict=True):
        for place, number in enumerate(OPERAND.findall(expression)):
            operands[shape, place].append(number)
    while True:
        shape = draw.choice(shapes)
        yield shape.format(*(draw.choice(operands[shape, place]) for place in range(shape.count("{}"))))


def evaluate(expression: str) -> str | None:
    """Return the value of `expression` as text; None if it is undefined, negative, at least 10^8, or has more than two
    decimals."""
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError):  # SyntaxError comes from a number with a leading zero, for example
        return None
    if value < 0 or value >= 10**8 or (100 * value).denominator != 1:
        return None
    return str(int(value)) if value.denominator == 1 else f"{float(value):.2f}".rstrip("0")


def _value(node: ast.expr) -> Fraction:
    """Return the exact value of the arithmetic expression `node`."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise SyntaxError(f"this is not an arithmetic expression: {ast.dump(node)}")
