"""Reference answers of built-in rewards: text or a number, or a list of alternatives."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from pydantic import Field

F = TypeVar("F", bound=Callable[..., Any])
Answers = Literal["one", "any"]
#: Python type of a value -> its name in messages.
_KINDS = {"dict": "an object", "list": "a list", "bool": "true or false", "NoneType": "null"}


#: The setting `answers` of rewards that compare with a reference answer.
ANSWERS: Any = Field(
    "one",
    description="one: an answer is text or a number; any: an answer may also be a list, and "
    "matching one entry is enough",
)


def answer_texts(value: Any, answers: Answers) -> list[str]:
    """Return the reference answers of a row as text: exactly one, or with `any` one or more. Raise ValueError if an
    answer is neither non-blank text nor a finite number."""
    if isinstance(value, list) and answers == "any" and value:
        return [text for item in value for text in answer_texts(item, "one")]
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("the answer is empty")
        return [value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        kind = _KINDS.get(type(value).__name__, f"a value of type {type(value).__name__}")
        raise ValueError("the list is empty" if value == [] and answers == "any" else f"the answer is {kind}")
    if not math.isfinite(value):
        raise ValueError("the answer is not a finite number")
    return [str(value)]


def meeting_any(function: F) -> F:
    """Add the setting `answers` to the reward `function(sample, *, ...)`. With it a sample may have several reference
    answers, and the result with the largest `overall` counts."""
    signature = inspect.signature(function)
    setting = inspect.Parameter("answers", inspect.Parameter.KEYWORD_ONLY, default="one")

    @functools.wraps(function)
    def score(sample: dict[str, Any], *, answers: Answers = "one", **settings: Any) -> Any:
        best: Any = None
        for text in answer_texts(sample["answer"], answers):
            result = function({**sample, "answer": text}, **settings)
            if best is None or result["overall"] > best["overall"]:
                best = result
            if best["overall"] >= 1:
                break
        return best

    parameters = [*signature.parameters.values(), setting]
    score.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return cast("F", score)
