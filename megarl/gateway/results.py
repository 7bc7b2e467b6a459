"""Reads the result that a program leaves: a number, or {"reward": number, "info": {name: number}}."""

from __future__ import annotations

import json
import math
import re

#: Names and beginnings of names of metrics `env/<name>` that megarl writes itself.
RESERVED = (
    *("calls", "undelivered", "refused_calls", "overflows", "retries", "timeouts", "samples", "branches/", "limits/"),
    *("cached", "cut", "errors", "greedy_errors", "tokens/", "turns/"),
)
_MOST_NUMBERS = 64
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,99}")


class ResultError(Exception):
    """A result that cannot be used."""


def parse_result(text: str, *, scored: bool) -> tuple[float, dict[str, float]]:
    """Return the reward and the numbers of a result.

    Args:
        scored: the program gives the score, so the result must have one.

    Raises:
        ResultError: the result has another form, or names of numbers that are not allowed.
    """
    try:
        value = json.loads(text)
        fields = value if isinstance(value, dict) else {"reward": value}
        reward = float(fields.get("reward", math.nan if scored else 0.0))
        info = {str(name): float(number) for name, number in dict(fields.get("info") or {}).items()}
    except (ValueError, TypeError, OverflowError, RecursionError):
        reward, info = math.nan, {}
    if not math.isfinite(reward):
        raise ResultError(
            f"the file MEGARL_RESULT has {text[:100]!r}; allowed: a number, or an object "
            f'{{"reward": number, "info": {{name: number}}}}'
        )
    if len(info) > _MOST_NUMBERS:
        raise ResultError(f"`info` in the file MEGARL_RESULT has {len(info)} numbers; allowed: {_MOST_NUMBERS}")
    for name, number in info.items():
        if not _NAME.fullmatch(name):
            raise ResultError(
                f"`info` in the file MEGARL_RESULT has the name {name[:100]!r}; allowed: letters, digits and _ . / -, "
                "up to 100 of them"
            )
        if not math.isfinite(number):
            raise ResultError(f"`info` in the file MEGARL_RESULT has {name}={number}; allowed: finite numbers")
        if any(name == reserved or (reserved[-1] == "/" and name.startswith(reserved)) for reserved in RESERVED):
            raise ResultError(
                f"`info` in the file MEGARL_RESULT has the name {name!r}, which megarl writes itself; allowed: names "
                "other than " + ", ".join(f"{reserved}*" if reserved[-1] == "/" else reserved for reserved in RESERVED)
            )
    return reward, info
