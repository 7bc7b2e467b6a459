"""Texts that make a careless regular expression hang, and how the time of the included scorers grows with them.

Models under reinforcement learning write endless white space, digits, braces and unclosed tags. A scorer reads them in
linear time: twice the text takes twice the time, not four or eight times. `math` is not among them: it
has a benchmark of its own (`mutations.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LENGTH = 65536
_ROUNDS = 5
#: name -> (beginning, text that is repeated up to `LENGTH`, end) of a text that is slow to read.
HOSTILE = {
    "newlines": ("a", "\n", "."),
    "newlines between numbers": ("1", "\n", "2"),
    "newlines after a sign": ("-", "\n", "x"),
    "newlines and dollars": ("", "\n$", "x"),
    "newlines after a fraction": (r"\frac{1}{2}", "\n", "x"),
    "digits": ("", "9", "x"),
    "thousands": ("1", ",000", "x"),
    "decimals": ("", "1.", "x"),
    "slashes": ("", "1/\n", "x"),
    "signs": ("", "- ", "5"),
    "numbers": ("", "7 -3 ", "x"),
    "braces": ("", "{", ""),
    "closing braces": (r"\boxed{1}", "}", ""),
    "unclosed boxes": ("", r"\boxed{", "1"),
    "unclosed boxes with white space": ("", r"\boxed  ", "{1"),
    "unclosed fractions": ("", r"\frac{1}{", "1"),
    "backslashes": (r"\boxed{", "\\", "}"),
    "marks": ("", "#### ", "18"),
    "empty marks": ("#### 18\n", "####\n", ""),
    "newlines after a mark": ("####", "\n", "- 18"),
    "a thought without an end": ("<think>", "a ", ""),
    "opening tags": ("", "<think>", ""),
    "closing tags": ("<think>a", "</think>", ""),
    "an empty thought": ("<think>", "\n", r"</think>\boxed{1}"),
}

Score = Callable[[str], object]


def hostile(name: str, length: int = LENGTH) -> str:
    """Return a text of HOSTILE with about `length` characters."""
    begin, unit, end = HOSTILE[name]
    return begin + unit * (length // len(unit)) + end


def scorers() -> dict[str, Score]:
    """Return the included scorers except `math`, with each setting that reads responses differently (answer: 18)."""
    from megarl.rewards.exact_match import exact_match
    from megarl.rewards.format import format_reward
    from megarl.rewards.gsm8k import gsm8k
    from megarl.rewards.numeric import numeric

    def sample(text: str) -> dict[str, Any]:
        return {"response": text, "answer": "18"}

    return {
        "gsm8k strict": lambda text: gsm8k(sample(text)),
        "gsm8k strict, marked": lambda text: gsm8k(sample(f"#### {text}")),
        "gsm8k flexible": lambda text: gsm8k(sample(text), method="flexible"),
        "numeric": lambda text: numeric(sample(text)),
        "numeric last": lambda text: numeric(sample(text), extract="last"),
        "exact_match": lambda text: exact_match(sample(text)),
        "format": lambda text: format_reward(sample(text)),
        "format, boxed": lambda text: format_reward(sample(text), think=False),
    }


def score_all(length: int = LENGTH) -> None:
    """Run every scorer on every hostile text."""
    texts = [hostile(name, length) for name in HOSTILE]
    for score in scorers().values():
        for text in texts:
            score(text)


def growth() -> float:
    """Return the largest over the scorers: CPU seconds for texts of twice LENGTH over those for LENGTH; 2 is linear."""
    short, long = ([hostile(name, n) for name in HOSTILE] for n in (LENGTH, 2 * LENGTH))

    def seconds(score: Score, texts: list[str]) -> float:
        rounds = []
        for _ in range(_ROUNDS):
            start = time.process_time()
            for text in texts:
                score(text)
            rounds.append(time.process_time() - start)
        return min(rounds)

    return max(seconds(score, long) / seconds(score, short) for score in scorers().values())
