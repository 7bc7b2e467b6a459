"""GSM8K: the number after `####`, or the last number of the response."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field

from megarl.algorithms.registry import Settings
from megarl.rewards.answers import ANSWERS, Answers, meeting_any
from megarl.rewards.numbers import find_numbers, parse_number
from megarl.rewards.registry import REWARDS

_MARK = "####"


class GSM8KSettings(Settings):
    """Which number in a response is its answer."""

    method: Literal["strict", "flexible"] = Field(
        "strict",
        description="strict: the number after the last `####` that has one; flexible: the last number of the response",
    )
    answers: Answers = ANSWERS


def read_reference(answer: str) -> tuple[Fraction, bool]:
    """Return a reference answer's number, and whether it is a percentage; raise ValueError if it holds no number."""
    reference = _read(_marked(answer) if _MARK in answer else _last(answer))
    if reference is None:
        place = f" after {_MARK}" if _MARK in answer else ""
        raise ValueError(f"no number can be read in the reference answer{place}: {answer!r}")
    return reference


@REWARDS.register("gsm8k", settings=GSM8KSettings, reference=read_reference)
@meeting_any
def gsm8k(sample: dict[str, Any], *, method: Literal["strict", "flexible"] = "strict") -> dict[str, Any]:
    """Score 1.0 when `method` reads the reference number from the response (Cobbe et al. 2021, arXiv:2110.14168).

    A percent sign is a unit, as `$` is: `20%` answers 20 (the data set has no percent in its answers), and also 0.2.
    Raise ValueError if the reference answer has no number, or `method` is unknown.

    Args:
        sample: `response` and `answer`; the answer may be the whole solution of the data set (`... #### 18`).
        method: strict reads the number after the last `####` that is followed by a number; flexible takes the last
            number of the response.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be strict or flexible, not {method!r}")
    expected, expects_percentage = read_reference(str(sample["answer"]))
    number = _read(_marked(sample["response"]) if method == "strict" else _last(sample["response"]))
    if number is None:
        return {"overall": 0.0, "extracted": ""}
    value, is_percentage = number
    equal = value == expected
    if is_percentage != expects_percentage:  # 20% also equals 0.2
        equal = equal or (value == expected * 100 if is_percentage else value * 100 == expected)
    return {"overall": float(equal), "extracted": str(value)}


def _marked(text: str) -> str | None:
    """Return the first number on the line of the last `####` that has a number; a `####` without one is ignored."""
    for part in reversed(text.split(_MARK)[1:]):
        line = part.lstrip().partition("\n")[0]
        numbers = find_numbers(line)
        if numbers:
            return f"-{numbers[0]}" if _is_after_minus(line, numbers[0]) else numbers[0]
    return None


def _is_after_minus(line: str, number: str) -> bool:
    """Return whether a minus and a space precede the first number of a line, with nothing in front to subtract from.
    `find_numbers` reads such a minus as an operator, as is right in the middle of a text."""
    if number.startswith(("-", "+", "\u2212")):
        return False
    first = re.search(r"[\d.]", line)
    before = line[: first.start()].rstrip().removesuffix("$").rstrip() if first else ""
    operand = before[:-1].rstrip()[-1:]
    return before.endswith(("-", "\u2212")) and not (operand.isalnum() or operand == ")")


def _last(text: str) -> str | None:
    numbers = find_numbers(text)
    return numbers[-1] if numbers else None


def _read(written: str | None) -> tuple[Fraction, bool] | None:
    """Return the number without its percent sign, and whether it had one; None without a number."""
    if written is None:
        return None
    bare = written.removesuffix("%").removesuffix("\\").rstrip()
    value = parse_number(bare)
    return None if value is None else (value, bare != written)
