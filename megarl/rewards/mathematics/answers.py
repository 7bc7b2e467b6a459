"""Extraction of answers from responses, and their comparison with the reference."""

from __future__ import annotations

import re
from collections import deque

from megarl.rewards.format import last_boxed
from megarl.rewards.mathematics.comparison import same
from megarl.rewards.mathematics.grammar import read
from megarl.rewards.mathematics.tokens import Token, canonical, clean, tokenize
from megarl.rewards.mathematics.tree import Apply, Node, Number, Relation, Symbol, UnreadError, walk
from megarl.rewards.mathematics.values import OutsideError
from megarl.rewards.mathematics.words import CHANGING

_MAX_LENGTH = 10_000  # characters; a longer answer is compared as text
_BARE_BOX = re.compile(r"\\f?box(?:ed)?\s*+(?P<token>\\[A-Za-z]+|[^\s\\{}])")
_SAID = re.compile(r"(?:answer|result)\s*(?:is|:|=)\s*:?", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+|\s*\\?%)?")
_LABEL = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\\(?:text(?:bf|rm|it)?|mathrm|mathbf)\s*\{\s*)?"
    r"(?:\(\s*(?P<round>[A-J])\s*\)|(?P<plain>[A-J])\s*[).:]|(?<=[enr]\s)(?P<worded>[A-J])(?=\s*\Z))"
    r"\s*\}?(?:\\[ ,;:]|\\q?quad|~|\s|[.:])*(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_BRACKETS = ("(", "[", "\\{", "\\left")
_LETTER = re.compile(r"(?:\\(?:text|textbf|mathrm)\s*\{\s*)?(?P<letter>[A-J])\s*\}?")
_FOLLOWS = re.compile(r"[-+.\d$]|\\(?:frac|dfrac|tfrac|sqrt|pi|\$|text|mathrm|\{|begin|infty|left)|[a-z(\[]")


def boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, or the token after a `\\boxed` without braces; None otherwise."""
    content = last_boxed(text)
    bare = _last(_BARE_BOX, text)
    if bare is None or (content is not None and text.rfind("{" + content + "}") > bare.start()):
        return content
    return bare["token"] if bare["token"] != "$" else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def unboxed(text: str) -> list[str]:
    """Return up to two candidate answers of a response without a box: the line that states the answer, or else the last
    line; and the last formula or number from there on.

    >>> unboxed("The answer is $x = 5$."), unboxed("so we have 3 + 4 = 7")
    (['$x = 5$', 'x = 5'], ['so we have 3 + 4 = 7', '7'])
    """
    introduction = _last(_SAID, text)
    rest = text[introduction.end() :].strip() if introduction is not None else text.strip()
    lines = rest.split("\n")
    formula, number = _last(_FORMULA, rest), _last(_NUMBER, rest)
    readings = [(lines[0] if introduction is not None else lines[-1]).strip().rstrip(" .")]
    if formula is not None and (number is None or number.start() < formula.end()):
        readings.append(next(group for group in formula.groups() if group is not None))
    elif number is not None:
        readings.append(number.group())
    return readings


def equal(reference: str, answer: str) -> bool:
    """Return whether an answer equals the reference (without boxes) as mathematics, or as text if one is not fully
    parsed."""
    if len(reference) > _MAX_LENGTH or len(answer) > _MAX_LENGTH:
        return reference.split() == answer.split()
    if reference.split() == answer.split():
        return True
    first, second = without_quantifier(clean(reference)), without_quantifier(clean(answer))
    if not first or not second:
        return False
    if first == second or _equal(first, second, grouping=True):
        return True
    if _labelled(first, second):
        return True
    listed = any(text.count(",") > 1 or text.startswith(_BRACKETS) for text in (first, second))
    return listed and ";" not in first + second and _equal(first, second, grouping=False)


def _tokens(text: str, grouping: bool) -> list[Token] | None:
    try:
        return tokenize(text, grouping)
    except UnreadError:
        return None


def _equal(first: str, second: str, grouping: bool) -> bool:
    left, right = _tokens(first, grouping), _tokens(second, grouping)
    if left is None or right is None:
        return " ".join(first.split()) == " ".join(second.split())
    if canonical(left) == canonical(right):
        return True
    try:
        gold, given = read(left), read(right)
        return same(gold, stated_value(given) if isinstance(gold, Number) else given)
    except (UnreadError, OutsideError, RecursionError):
        return False


def _label(text: str) -> tuple[str, str] | None:
    """Return the letter of a choice and the text after it: `\\textbf{(C)}\\ 24`."""
    match = _LABEL.fullmatch(text)
    letter = "" if match is None else match["round"] or match["plain"] or match["worded"]
    if match is None or not letter.isupper():
        return None
    rest = match["rest"].strip()
    return (letter, rest) if not rest or _FOLLOWS.match(rest) else None


def _labelled(first: str, second: str) -> bool:
    """Return whether two choices agree: in letter and value where both have them, else in the part that both have."""
    left, right = _label(first), _label(second)
    if left is not None and right is not None:
        letters = left[0] == right[0]
        return letters and (not left[1] or not right[1] or _equal(left[1], right[1], grouping=True))
    label, other = (left, second) if left is not None else (right, first)
    if label is None:
        return False
    letter = _LETTER.fullmatch(other)
    if letter is not None:
        return label[0] == letter["letter"]
    pair = (label[1], other) if left is not None else (other, label[1])
    return bool(label[1]) and _equal(*pair, grouping=True)


_ORDINAL = re.compile(r".*ths?")  # for example tenths
_FUNCTION = re.compile(r"[A-Za-z]\((?P<letter>[a-z])\)\s*=")
_FOR_ALL = re.compile(
    r"(?:for (?:all|any|every)(?: real(?: numbers?)?)?\s*+(?P<inner>\})?|\\forall)\s*+\$?(?P<letter>[a-z])\$?"
    r"\s*+(?:\\in\s*+\\mathbb\s*+\{?\s*+R\s*+\}?)?\s*+(?P<outer>\})?"
)


def stated_value(answer: Node) -> Node:
    """Return 72 for the answer `72 clips`, and 73 for `m + n = 73`; return other answers unchanged."""
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
    quantifier = None if function is None or place < 0 else _FOR_ALL.fullmatch(text, place)
    if function is None or quantifier is None or quantifier["letter"] != function["letter"]:
        return text
    head = text[:place].rstrip(" ,")
    if head.endswith("\\text{") != bool(quantifier["inner"] or quantifier["outer"]):
        return text
    return head.removesuffix("\\text{").rstrip(" ,")
