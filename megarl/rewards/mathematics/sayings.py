"""Answers with words around the reference's bare value: the counted things, the name of a sum, a quantifier."""

from __future__ import annotations

import re

from megarl.rewards.mathematics.tree import Apply, Node, Number, Relation, Symbol, walk
from megarl.rewards.mathematics.words import CHANGING

_ORDINAL = re.compile(r".*ths?")  # tenths
_FUNCTION = re.compile(r"[A-Za-z]\((?P<letter>[a-z])\)\s*=")
_FOR_ALL = re.compile(
    r"(?:for (?:all|any|every)(?: real(?: numbers?)?)?\s*+(?P<inner>\})?|\\forall)\s*+\$?(?P<letter>[a-z])\$?"
    r"\s*+(?:\\in\s*+\\mathbb\s*+\{?\s*+R\s*+\}?)?\s*+(?P<outer>\})?"
)


def said_value(answer: Node) -> Node:
    """Return the number of `72 clips` or `m + n = 73`, else the answer unchanged."""
    if isinstance(answer, Apply) and answer.name == "*" and len(answer.args) == 2:
        number, noun = answer.args
        if isinstance(number, Number) and number.base is None and _is_noun(noun):
            return number
    if isinstance(answer, Relation) and answer.ops == ("=",) and answer.modulus is None:
        for total, value in (answer.sides, answer.sides[::-1]):
            if isinstance(value, Number) and _is_sum_of_names(total):
                return value
    return answer


def _is_noun(node: Node) -> bool:
    if not (isinstance(node, Symbol) and node.kind == "word"):
        return False
    name = node.name
    return len(name) > 2 and name.isalpha() and name.islower() and name not in CHANGING and not _ORDINAL.fullmatch(name)


def _is_sum_of_names(node: Node) -> bool:
    """Return whether this is a sum of different letters, as `m + n`."""
    parts = list(walk(node))
    names = [part.name for part in parts if isinstance(part, Symbol) and part.kind == "variable"]
    sums = sum(isinstance(part, Apply) and part.name == "+" for part in parts)
    return sums > 0 and sums + len(names) == len(parts) and len(set(names)) == len(names)


def without_quantifier(text: str) -> str:
    """Return `f(x)=2x` for `f(x)=2x for all x`.

    >>> without_quantifier(r"f(x)=2x \\text{ for all } x"), without_quantifier("f(x)=2x for all y")
    ('f(x)=2x', 'f(x)=2x for all y')
    """
    function, place = _FUNCTION.match(text), max(text.rfind("for "), text.rfind("\\forall"))
    said = None if function is None or place < 0 else _FOR_ALL.fullmatch(text, place)
    if function is None or said is None or said["letter"] != function["letter"]:
        return text
    head = text[:place].rstrip(" ,")
    if head.endswith("\\text{") != bool(said["inner"] or said["outer"]):
        return text
    return head.removesuffix("\\text{").rstrip(" ,")
