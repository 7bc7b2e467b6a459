"""String equality."""

from __future__ import annotations

from typing import Any


def exact_match(sample: dict[str, Any], *, ignore_case: bool = False) -> dict[str, Any]:
    """1.0 when response and answer are the same text, white space at the ends and runs of it aside."""
    response, answer = (" ".join(str(sample[key]).split()) for key in ("response", "answer"))
    if ignore_case:
        response, answer = response.casefold(), answer.casefold()
    return {"overall": float(response == answer), "extracted": response}
