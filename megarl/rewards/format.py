"""Shape of a response: reasoning in <think> tags, the answer in a box."""

from __future__ import annotations

import re
from typing import Any

_THINK = re.compile(r"\s*<think>(.*?\S.*?)</think>(.*)", re.DOTALL)


def format_reward(sample: dict[str, Any], *, think: bool = True, boxed: bool = True) -> float:
    """1.0 when the response has the asked form.

    Args:
        sample: `response`.
        think: the response starts with exactly one `<think>...</think>` that is not empty.
        boxed: what follows (the whole response without `think`) holds a closed, non-empty `\\boxed{...}`.
    """
    rest = sample["response"]
    if think:
        match = _THINK.fullmatch(rest)
        if match is None or rest.count("<think>") != 1 or rest.count("</think>") != 1:
            return 0.0
        rest = match[2]
    return float(not boxed or bool((last_boxed(rest) or "").strip()))


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` or `\\fbox{...}` whose braces close, or None.

    >>> last_boxed(r"so \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?\s*\{", text))):
        depth, escaped = 1, False
        for end in range(match.end(), len(text)):
            char = text[end]
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char in "{}":
                depth += 1 if char == "{" else -1
                if depth == 0:
                    return text[match.end() : end]
    return None
