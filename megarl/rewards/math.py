"""Symbolic equality of mathematical answers through `math-verify`.

SymPy can run for ever on a hostile expression, so every sample has its own limit of CPU time: an alarm that interrupts
Python code here, and then the reward pool, which kills a process that hangs inside one C call. This scorer
therefore always runs in a worker process (an alarm needs the main thread of one), the only place that imports
`math-verify`: before the first sample, because that takes longer than a sample may.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

from pydantic import Field

from megarl.algorithms.registry import Settings
from megarl.rewards.answers import ANSWERS, Answers, meeting_any
from megarl.rewards.format import last_boxed
from megarl.rewards.registry import REWARDS

_TAIL = 600  # characters of an unboxed response that are searched, the answer stands at the end

# Units that math-verify does not know (it knows cm, hours and such): money after a number, and money or a plain unit
# after `$...$`. Any other word may change the value: `$2$ pi`, `$3$ million`, `$50$ percent`.
_SPACE = r"(?:\s|~|\\[ ,;:!])*+"
_MONEY = r"(?:(?:US|U\.S\.)\s+)?(?:dollar|cent|euro|pound|rupee|peso|buck)s?|pence|yen|yuan|USD|EUR|GBP"
_NUMBER_AND_UNIT = re.compile(rf"(?P<value>.*[\d}}]){_SPACE}(?P<unit>{_MONEY})\.?", re.DOTALL | re.IGNORECASE)
_LENGTH = r"(?:(?:kilo|centi|milli)?met(?:er|re)|mile|yard)s?"
_PLAIN = (
    rf"(?:(?:square|cubic) )?(?:{_LENGTH}|units?)|{_LENGTH} per (?:second|minute|hour)|"
    r"(?:(?:kilo|milli)?gram|lit(?:er|re)|cup|degree|second|minute|hour|day|week|month|year)s?"
)
_MATH_AND_UNIT = re.compile(rf"\$(?P<value>[^$]+)\${_SPACE}(?P<unit>{_MONEY}|{_PLAIN})\.?", re.IGNORECASE)

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # they warn that their own timeouts are off


class _TimeLimit(BaseException):
    """Raised by the alarm. Not an Exception: SymPy and math-verify swallow those."""


class MathSettings(Settings):
    """Which expression of a response counts, and how long it may be compared."""

    method: Literal["strict", "flexible"] = Field(
        "strict", description=r"strict: the last `\boxed{}`; flexible: without one, the last expression"
    )
    timeout_s: float = Field(5.0, gt=0, description="CPU seconds per sample; what takes longer is wrong")
    answers: Answers = ANSWERS


def _import() -> None:
    import math_verify  # noqa: F401


def read_reference(answer: str) -> str:
    """The reference as it is compared, out of its box; raises ValueError when it is empty."""
    gold = (last_boxed(answer) or answer).strip()
    if not gold:
        raise ValueError("the reference answer is empty")
    return gold


@REWARDS.register(
    "math",
    settings=MathSettings,
    package="math-verify",
    prepare=_import,
    limit="timeout_s",
    reference=read_reference,
)
@meeting_any
def math(
    sample: dict[str, Any], *, method: Literal["strict", "flexible"] = "strict", timeout_s: float = 5.0
) -> dict[str, Any]:
    """1.0 when the response's answer equals the reference as mathematics (`1/2` = `0.5` = `\\frac{2}{4}`).

    Args:
        sample: `response` and `answer` (LaTeX or plain, boxed or not).
        method: strict reads the last `\\boxed{}` only; flexible falls back on the last expression of the response.
        timeout_s: CPU seconds per sample; what cannot be decided in time is wrong and has part `timeout` = 1.

    Raises:
        ValueError: the reference answer is empty, or an argument is out of range.
    """
    if method not in ("strict", "flexible") or not timeout_s > 0:
        raise ValueError(f"method must be strict or flexible and timeout_s positive, not {method!r} and {timeout_s!r}")
    gold = read_reference(str(sample["answer"]))
    boxed = last_boxed(sample["response"])
    candidate = boxed if boxed is not None or method == "strict" else sample["response"][-_TAIL:]
    extracted = (boxed or "").strip()
    if candidate is None or not candidate.strip():
        return {"overall": 0.0, "timeout": 0.0, "extracted": extracted}
    if candidate.strip() == gold:
        return {"overall": 1.0, "timeout": 0.0, "extracted": extracted}
    try:
        with _time_limit(timeout_s):
            equal = _equal(gold, candidate.strip(), boxed is not None)
    except _TimeLimit:
        return {"overall": 0.0, "timeout": 1.0, "extracted": extracted}
    return {"overall": float(equal), "timeout": 0.0, "extracted": extracted}


def _equal(gold: str, candidate: str, boxed: bool) -> bool:
    from math_verify import parse, verify

    (bare_gold, gold_unit), (bare, unit) = _without_unit(gold), _without_unit(candidate) if boxed else (candidate, "")
    if not gold_unit or not unit or gold_unit == unit:  # 5 dollars are not 5 euros
        gold, candidate = bare_gold, bare
    parsed = parse(_box(candidate) if boxed else candidate, parsing_timeout=None)
    return bool(verify(_parse_gold(gold), parsed, timeout_seconds=None))


def _without_unit(text: str) -> tuple[str, str]:
    """The answer without a unit in words, and that unit in one spelling ("" when there is none).

    >>> _without_unit("$50$ dollars"), _without_unit("2 pi")
    (('50', 'dollar'), ('2 pi', ''))
    """
    match = _MATH_AND_UNIT.fullmatch(text) or _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        return text, ""
    return match["value"].strip(), " ".join(match["unit"].lower().split()).removeprefix("us ").removesuffix("s")


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    from math_verify import parse

    return parse(_box(gold), parsing_timeout=None)


def _box(text: str) -> str:
    return rf"\boxed{{{text}}}"


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    inside = True

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if inside:
            raise _TimeLimit

    before, report = signal.signal(signal.SIGPROF, on_alarm), sys.unraisablehook

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not _TimeLimit:
            report(lost)

    # Again and again: Python drops what is raised inside a finaliser or a callback of the garbage collector, and would
    # report it as an error.
    sys.unraisablehook = unraisable
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.02)
    try:
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        sys.unraisablehook = report
