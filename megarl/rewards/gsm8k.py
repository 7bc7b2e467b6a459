"""GSM8K: the number after `####`, or the last number of the response."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Literal

from megarl.rewards.numbers import canonical, find_numbers, parse_number

_MARKED = re.compile(r"####\s*([^\n]*)")


def gsm8k(sample: dict[str, Any], *, method: Literal["strict", "flexible"] = "strict") -> dict[str, Any]:
    """1.0 when the response ends in the reference number (Cobbe et al. 2021, arXiv:2110.14168).

    Args:
        sample: `response` and `answer`; the answer may be the whole solution of the data set (`... #### 18`).
        method: strict reads the number after the last `####` only; flexible takes the last number of the response.

    Raises:
        ValueError: the reference answer holds no number, or `method` is unknown.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be strict or flexible, not {method!r}")
    reference = (
        _marked_number(str(sample["answer"])) if "####" in str(sample["answer"]) else _last(str(sample["answer"]))
    )
    if reference is None:
        raise ValueError(f"the reference answer holds no number: {sample['answer']!r}")
    value = _marked_number(sample["response"]) if method == "strict" else _last(sample["response"])
    return {"overall": float(value == reference), "extracted": "" if value is None else canonical(value)}


def _marked_number(text: str) -> Fraction | None:
    marks = _MARKED.findall(text)
    numbers = find_numbers(marks[-1]) if marks else []
    return parse_number(numbers[0]) if numbers else None


def _last(text: str) -> Fraction | None:
    numbers = find_numbers(text)
    return parse_number(numbers[-1]) if numbers else None
