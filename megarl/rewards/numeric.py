"""Numeric comparison of a response with the answer."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

from pydantic import Field

from megarl.algorithms.registry import Settings
from megarl.rewards.answers import ANSWERS, Answers, meeting_any
from megarl.rewards.numbers import find_numbers, parse_number
from megarl.rewards.registry import REWARDS


class NumericSettings(Settings):
    """Which number in a response is its answer, and the tolerance."""

    tolerance: float = Field(1e-6, ge=0, description="largest accepted error, as a multiple of max(1, |answer|)")
    extract: Literal["whole", "first", "last"] = Field(
        "whole",
        description="whole: the response is nothing but the number; first or last: the first or last number "
        "in the response",
    )
    evaluated: bool = Field(False, description="refuse a response that is written as a quotient")
    answers: Answers = ANSWERS


def read_reference(answer: str) -> Fraction:
    """Return the number of a reference answer; raise ValueError when it is not a number."""
    value = parse_number(answer)
    if value is None:
        raise ValueError(f"the reference answer cannot be read as a number: {answer!r}")
    return value


@REWARDS.register("numeric", settings=NumericSettings, reference=read_reference, whole=True)
@meeting_any
def numeric(
    sample: dict[str, Any],
    *,
    tolerance: float = 1e-6,
    extract: Literal["whole", "first", "last"] = "whole",
    evaluated: bool = False,
) -> dict[str, Any]:
    """Score 1.0 when the response denotes the same number as the answer: `24` = `24.0` = `48/2`, `1,000` = `1e3`.
    Raise ValueError if the answer is not a number, or an argument is out of range.

    Args:
        sample: `response` and `answer`.
        tolerance: |response - answer| may be at most tolerance * max(1, |answer|).
        extract: `whole` expects a response that is only a number; `first` or `last` reads that number of the response.
        evaluated: refuse a response written as a quotient, which would let `48/2` answer the prompt `48/2=`.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, not {tolerance!r}")
    reference = read_reference(str(sample["answer"]))
    if extract not in ("whole", "first", "last"):
        raise ValueError(f"extract must be whole, first or last, not {extract!r}")
    numbers = [sample["response"]] if extract == "whole" else find_numbers(sample["response"])
    value = parse_number(numbers[-1 if extract == "last" else 0]) if numbers else None
    if value is None or (evaluated and ("/" in sample["response"] or "frac" in sample["response"])):
        return {"overall": 0.0, "extracted": ""}
    close = abs(value - reference) <= Fraction(tolerance) * max(Fraction(1), abs(reference))
    return {"overall": float(close), "extracted": str(value)}
