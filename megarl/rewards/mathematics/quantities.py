"""Units and numbers in words, and the products and signs of expressions."""

from __future__ import annotations

import itertools
from fractions import Fraction

from megarl.rewards.mathematics import words
from megarl.rewards.mathematics.tokens import Token
from megarl.rewards.mathematics.tree import Apply, Compound, Node, Number, Symbol, UnreadError, walk


def known_words(text: str) -> Node | None:
    """Return a unit, a number or a set written in words; None for other words."""
    lower = text.lower()
    if lower in words.SPEEDS:
        over, under = words.SPEEDS[lower]
        return Apply("*", (Symbol(over, "unit"), Apply("inv", (Symbol(under, "unit"),))))
    if lower in words.NO_SOLUTION:
        return Compound("set", ())
    if lower == "infinity":
        return Symbol("infty", "constant")
    unit = words.UNIT_SPELLINGS.get(text) or (words.UNIT_SPELLINGS.get(lower) if len(text) > 2 else None)
    if unit is not None:
        return Symbol(unit, "unit")
    if lower.startswith(("square ", "cubic ", "sq ")):
        inner = known_words(text.partition(" ")[2])
        power = 3 if lower.startswith("cubic") else 2
        return (
            Apply("^", (inner, Number(Fraction(power)))) if isinstance(inner, Symbol) and inner.kind == "unit" else None
        )
    if " per " in lower:
        left, _, right = text.partition(" per ")
        top, bottom = known_words(left), known_words(right)
        if top is not None and bottom is not None and is_unit(top) and is_unit(bottom):
            return Apply("*", (top, Apply("inv", (bottom,))))
        return None
    if lower in words.MULTIPLIERS:
        return Apply("*", (Number(Fraction(words.MULTIPLIERS[lower])),))
    if lower in words.NUMERALS:
        return Number(Fraction(words.NUMERALS[lower]))
    if lower in ("percent", "percents"):
        return Symbol("percent", "unit")
    if lower in ("degree", "degrees"):
        return Symbol("degree", "unit")
    return None


def letter(text: str) -> Symbol:
    """Return the constant or the variable that a letter stands for: e and i are constants."""
    return Symbol(text, "constant" if text in ("e", "i") else "variable")


def with_signs(signs: list[str], node: Node) -> Node:
    """Return a value with the signs before it applied."""
    for sign in reversed(signs):
        if sign != "+":
            node = Apply({"-": "neg", "\\pm": "pm", "\\mp": "mp"}[sign], (node,))
    return node


def product(factors: list[Node]) -> Node:
    """Return the product of `factors`. `x percent` becomes x%, `x degrees` x with a degree sign, and `7 million` a
    number."""
    made: list[Node] = []
    for factor in factors:
        if made and factor == Symbol("percent", "unit"):
            made[-1] = Apply("%", (made[-1],))
        elif made and factor == Symbol("degree", "unit"):
            made[-1] = Apply("deg", (made[-1],))
        else:
            made.append(factor)
    for left, right in itertools.pairwise(made):
        if isinstance(left, Symbol) and isinstance(right, Symbol) and "word" in (left.kind, right.kind):
            raise UnreadError("a word next to a symbol cannot be read as a product")
    return made[0] if len(made) == 1 else Apply("*", tuple(made))


def is_unit(node: Node) -> bool:
    """Return whether a factor is a unit, or ends in one."""
    return any(isinstance(part, Symbol) and part.kind == "unit" for part in walk(node)) and not any(
        isinstance(part, Symbol) and part.kind == "variable" for part in walk(node)
    )


def is_proper(top: Number, bottom: Number) -> bool:
    """Return whether top / bottom is a proper fraction of integers, which after an integer makes a mixed number."""
    exact = top.places is None and bottom.places is None and top.base is None and bottom.base is None
    return exact and 0 < top.value < bottom.value and top.value.denominator == bottom.value.denominator == 1


def is_differential(tokens: list[Token]) -> bool:
    """Return whether a part of a fraction belongs to a derivative: `dy`, `d^2y`, `\\partial x`."""
    bare = [token for token in tokens if token.text not in ("{", "}")]
    if len(bare) > 7 or not bare or bare[0].text not in ("d", "\\partial") or bare[0].kind not in ("letter", "command"):
        return False
    return all(token.kind in ("letter", "number") or token.text == "^" or token.text[0] == "\\" for token in bare)
