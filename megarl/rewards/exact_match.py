"""String equality."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from megarl.algorithms.registry import Settings
from megarl.rewards.answers import ANSWERS, Answers, meeting_any
from megarl.rewards.registry import REWARDS


class ExactMatchSettings(Settings):
    """How exact_match compares texts."""

    ignore_case: bool = Field(False, description="count upper and lower case as equal")
    answers: Answers = ANSWERS


@REWARDS.register("exact_match", settings=ExactMatchSettings, reference=str, whole=True)
@meeting_any
def exact_match(sample: dict[str, Any], *, ignore_case: bool = False) -> dict[str, Any]:
    """Score 1.0 when response and answer are the same text, up to white space."""
    response, answer = (" ".join(str(sample[key]).split()) for key in ("response", "answer"))
    if ignore_case:
        response, answer = response.casefold(), answer.casefold()
    return {"overall": float(response == answer), "extracted": response}
