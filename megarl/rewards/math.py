"""Equality of mathematical answers.

`megarl.rewards.mathematics` reads both answers in time that grows with their length, within bounds. Each sample also
has a time limit: an alarm interrupts Python code here, and the reward pool kills a process that hangs inside one C
call. This scorer therefore always runs in a worker process (an alarm needs its main thread).
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

from pydantic import Field

from megarl.algorithms.registry import Settings
from megarl.rewards.answers import ANSWERS, Answers, meeting_any
from megarl.rewards.mathematics import boxed, equal, unboxed
from megarl.rewards.mathematics.values import DIGITS, context
from megarl.rewards.registry import REWARDS

_TAIL = 600  # characters at the end of a response without a box that are searched for the answer


class _TimeLimit(BaseException):
    """The alarm's exception. It is not an Exception, because `except Exception` would swallow it."""


class MathSettings(Settings):
    """Which expression of a response counts, and the time limit of the comparison."""

    method: Literal["strict", "flexible", "answer"] = Field(
        "strict",
        description="strict: the last `\\boxed{}`; flexible: the last expression if there is no box; answer: the "
        "last `<answer>...</answer>`",
    )
    timeout_s: float = Field(5.0, gt=0, description="CPU seconds per sample, after which the answer counts as wrong")
    answers: Answers = ANSWERS


def read_reference(answer: str) -> str:
    """Return the reference without its box, in the form that is compared; raise ValueError when it is empty."""
    gold = (boxed(answer) or answer).strip()
    if not gold:
        raise ValueError("the reference answer is empty")
    return gold


@REWARDS.register(
    "math",
    settings=MathSettings,
    package="mpmath",
    prepare=lambda settings: context(DIGITS),  # imports mpmath before the first sample is scored
    limit="timeout_s",
    reference=read_reference,
)
@meeting_any
def math(
    sample: dict[str, Any], *, method: Literal["strict", "flexible", "answer"] = "strict", timeout_s: float = 5.0
) -> dict[str, Any]:
    """Score 1.0 when the response's answer equals the reference as mathematics (`1/2` = `0.5` = `\\frac{2}{4}`).

    An answer is mathematics only if all of its numbers, letters and words are parsed; else its normalised text is
    compared. Rational numbers are compared exactly, other values to forty digits, and a decimal equals a value that
    differs by less than one in its last place, and at most by a millionth of it. A unit, a percent sign or a label
    (`(C) 24`) may be missing in one of the answers, but must not differ. Raise ValueError if the reference answer is
    empty, or an argument is out of range.

    Args:
        sample: `response` and `answer` (LaTeX or plain, boxed or not).
        method: strict reads the last `\\boxed{}` only; flexible falls back on the stated answer, the last formula or
            number; answer reads the last `<answer>...</answer>`, boxed in it or not.
        timeout_s: CPU seconds per sample; an undecided answer is wrong and has part `timeout` = 1.
    """
    if method not in ("strict", "flexible", "answer") or not timeout_s > 0:
        raise ValueError(
            f"method must be strict, flexible or answer and timeout_s positive, not {method!r} and {timeout_s!r}"
        )
    gold = read_reference(str(sample["answer"]))
    content = boxed(sample["response"]) if method != "answer" else _tagged(sample["response"])
    extracted = (content or "").strip()
    candidates = [extracted] if extracted else []
    if content is None and method == "flexible":
        candidates = unboxed(sample["response"][-_TAIL:])
    try:
        with _time_limit(timeout_s):
            expression = any(equal(gold, candidate) for candidate in candidates)
    except _TimeLimit:
        return {"overall": 0.0, "timeout": 1.0, "extracted": extracted}
    return {"overall": float(expression), "timeout": 0.0, "extracted": extracted}


def _tagged(response: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`, without a box around it; None without such a tag."""
    _, opened, rest = response.rpartition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    return (boxed(content) or content) if opened and closed else None


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

    # Python drops the alarm's exception inside a finaliser or a callback of the garbage collector. The alarm therefore
    # repeats every 0.02 s, and this hook does not report dropped exceptions of the alarm.
    sys.unraisablehook = unraisable
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.02)
    try:
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        sys.unraisablehook = report
