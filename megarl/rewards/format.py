"""The form of a response: reasoning in <think> tags, the answer in a box or in <answer> tags."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from megarl.algorithms.registry import Settings
from megarl.rewards.registry import REWARDS

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped character such as \{, or a brace that opens or closes a group


class FormatSettings(Settings):
    """Required parts of a response."""

    think: bool = Field(True, description="require one non-empty `<think>...</think>` at the start")
    boxed: bool = Field(True, description=r"require a closed, non-empty `\boxed{...}` in the rest of the response")
    answer: bool = Field(False, description="require that the rest is one non-empty `<answer>...</answer>`")


@REWARDS.register("format", settings=FormatSettings, whole=True)
def format_reward(sample: dict[str, Any], *, think: bool = True, boxed: bool = True, answer: bool = False) -> float:
    """Return 1.0 when the response has the required form.

    Args:
        sample: `response`, and `prompt`, which some chat templates end with `<think>`, continued by the response.
        think: the response starts with exactly one `<think>...</think>` that is not empty.
        boxed: the rest (without `think`, the whole response) contains a closed, non-empty `\\boxed{...}`.
        answer: the rest is exactly one `<answer>...</answer>` that is not empty.
    """
    rest = sample["response"]
    if think:
        if sample.get("prompt", "").rstrip().endswith("<think>"):
            rest = "<think>" + rest
        if rest.count("<think>") != 1 or rest.count("</think>") != 1:
            return 0.0
        thoughts, _, rest = rest.lstrip().partition("</think>")
        if not thoughts.startswith("<think>") or not thoughts.removeprefix("<think>").strip():
            return 0.0
    if answer:
        whole = rest.strip()
        inside = whole.removeprefix("<answer>").removesuffix("</answer>")
        if len(whole) - len(inside) != len("<answer></answer>") or not inside.strip():
            return 0.0
        if "<answer>" in inside or "</answer>" in inside:
            return 0.0
    return float(not boxed or bool((last_boxed(rest) or "").strip()))


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` whose braces close, or None.

    >>> last_boxed(r"so \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    starts = {match.end() for match in _BOX.finditer(text)}
    if not starts:
        return None
    last: tuple[int, int] | None = None
    # Start of the content of each open brace. With it one pass over the text is enough, even if boxes never close.
    open_braces: list[int] = []
    for token in _BRACE.finditer(text, min(starts) - 1):
        if token.group() == "{":
            open_braces.append(token.end())
        elif token.group() == "}" and open_braces:
            start = open_braces.pop()
            if start in starts and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else text[last[0] : last[1]]
