"""Reading numbers out of text, exactly: every number is a `Fraction`, so rounding noise never decides a reward."""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_DIGITS = 64  # a longer number is noise, and a huge exponent would build a huge integer
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,2}})?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+\u2212]?)\s*\$?\s*(?P<num>{_UNSIGNED})(?:\s*/\s*(?P<den>{_UNSIGNED}))?\s*(?P<pct>\\?%)?"
)
_FRAC = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def parse_number(text: str) -> Fraction | None:
    """The number that `text` as a whole denotes, or None.

    Understands `24`, `24.0`, `.5`, `-3`, `1,000`, `1/2`, `\\frac{1}{2}`, `$18`, `1e3`; `50%` is 1/2.
    """
    match = _NUMBER.fullmatch(_plain(text).rstrip(".").strip())
    return _value(match) if match else None


def find_numbers(text: str) -> list[str]:
    """All numbers in `text` from left to right, as they are written (a trailing full stop is not part of one)."""
    found, plain = [], _plain(text)
    for match in _NUMBER.finditer(plain):
        before = plain[: match.start()]
        written = match.group().strip()
        # In "7-3", "7 -3", "n-3" and "n - 3" the sign is an operator, in "and -3" it is part of the number.
        operator = before[-1:].isalnum() or before.rstrip()[-1:] in tuple("0123456789)") or written[1:2] == " "
        if match["sign"] and operator:
            written = written[1:].strip()
        found.append(written.rstrip("."))
    return found


def _plain(text: str) -> str:
    return _FRAC.sub(r"\1/\2", text).strip()


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match.group()) > _MAX_DIGITS:
        return None
    value = Fraction(match["num"].replace(",", ""))
    if match["den"]:
        denominator = Fraction(match["den"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    if match["pct"]:
        value /= 100
    return -value if match["sign"] in ("-", "\u2212") else value


def canonical(value: Fraction) -> str:
    """One spelling per value, for majority votes: `24`, `1/3`."""
    return str(value)
