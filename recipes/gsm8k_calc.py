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
