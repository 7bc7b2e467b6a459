"""Exact reading of numbers in text: every number is a `Fraction`, so rounding noise never decides a reward."""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_DIGITS = 64  # a longer number is noise, and a huge exponent would build a huge integer
_SIGNS = "-+\u2212"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,2}})?"
# Possessive quantifiers (*+) never backtrack, so a run of white space is read once, not once per way to split it.
_AFTER_SIGN = rf"(?P<num>{_UNSIGNED})(?:\s*+/\s*+(?P<den>{_UNSIGNED}))?\s*+(?P<pct>\\?%)?"
_NUMBER = re.compile(rf"(?P<sign>[{_SIGNS}]?)\s*+\$?+\s*+{_AFTER_SIGN}")
_WITHOUT_SIGN = re.compile(_AFTER_SIGN)
_FRAC = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def parse_number(text: str) -> Fraction | None:
    """Return the number that `text` as a whole denotes, or None. Understands `24`, `24.0`, `.5`, `-3`, `1,000`, `1/2`,
    `\\frac{1}{2}`, `$18`, `1e3`; `50%` is 1/2."""
    match = _NUMBER.fullmatch(_plain(text).rstrip(".").strip())
    return _value(match) if match else None


def find_numbers(text: str) -> list[str]:
    """Return all numbers in `text` from left to right, as written (a trailing full stop is not part of one). Linear in
    the length of `text`: digits are found first, then sign and dollar in the gap before them."""
    numbers, plain = [], _plain(text)
    end, last = 0, ""  # where the previous number ends, and its last character
    for match in _WITHOUT_SIGN.finditer(plain):
        gap = plain[end : match.start()].rstrip()
        if gap.endswith("$"):
            gap = gap[:-1].rstrip()
        start = end + len(gap)
        signed = gap.endswith(tuple(_SIGNS))
        if signed:
            start -= 1
        written = plain[start : match.end()].strip()
        # In "7-3", "7 -3", "n-3" and "n - 3" the sign is an operator, in "and -3" it is part of the number.
        before = gap[:-1].rstrip()[-1:] or last
        if signed and (
            plain[max(0, start - 1) : start].isalnum() or (before and before in "0123456789)") or written[1:2] == " "
        ):
            written = written[1:].strip()
        numbers.append(written.rstrip("."))
        end, last = match.end(), match.group().rstrip()[-1]
    return numbers


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
