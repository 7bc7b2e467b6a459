"""Sets of real numbers: intervals, inequalities, set-builders and solutions, as unions of intervals."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megarl.rewards.mathematics import words
from megarl.rewards.mathematics.tree import Apply, Compound, Node, Number, Relation, Symbol, UnreadError, symbols
from megarl.rewards.mathematics.values import DIGITS, Evaluation, OutsideError, context, exact, near

_MAX_PARTS = 64
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
#: Points of both signs, some not integers, at which a side is evaluated to test that it is linear (not |x| or a floor).
_TRIED = (Fraction(1), Fraction(2), Fraction(7, 3), Fraction(-5, 2), Fraction(-100003, 7))
INFINITY = Symbol("infty", "constant")


@dataclass(frozen=True)
class Endpoint:
    """An end of an interval: its exact value where it is rational, and an approximation."""

    node: Node
    exact: Fraction | None
    value: Any

    def same(self, other: Endpoint) -> bool:
        """Return whether the two endpoints are the same number."""
        if self.exact is not None and other.exact is not None:
            return self.exact == other.exact
        return near(self.value, other.value)

    def below(self, other: Endpoint) -> bool:
        """Return whether this endpoint of an interval has a smaller value than `other`."""
        return not self.same(other) and bool(self.value < other.value)


@dataclass(frozen=True)
class RealInterval:
    """An interval; a point has both ends equal and closed."""

    low: Endpoint
    high: Endpoint
    with_low: bool
    with_high: bool


@dataclass(frozen=True)
class Region:
    """A union of ordered intervals of one variable (None: any variable)."""

    spans: tuple[RealInterval, ...]
    variable: str | None = None

    def same(self, other: Region) -> bool:
        """Return whether both are the same set of the same variable; a region without a variable is about any
        variable."""
        named = self.variable == other.variable or None in (self.variable, other.variable)
        return named and len(self.spans) == len(other.spans) and all(map(_same_span, self.spans, other.spans))


def _same_span(a: RealInterval, b: RealInterval) -> bool:
    closed = (a.with_low, a.with_high) == (b.with_low, b.with_high)
    return closed and a.low.same(b.low) and a.high.same(b.high)


def region(node: Node) -> Region | None:
    """Return the set of real numbers that an answer denotes; None if this module cannot read it."""
    try:
        return _region(node)
    except (UnreadError, OutsideError):
        return None


def _region(node: Node) -> Region:
    if isinstance(node, Symbol) and (node.name == "bbR" or (node.kind == "word" and node.name in words.ALL_REALS)):
        return everything()
    if isinstance(node, Compound):
        return _group(node)
    if isinstance(node, Relation):
        return _relation(node)
    if isinstance(node, Apply) and node.name in ("cup", "cap", "\\", "+"):
        return _operation(node)
    name = "a number" if isinstance(node, Number) else f"{node.name!r}"
    raise UnreadError(f"{name} is not an interval, a set, an inequality or an operation on sets of real numbers")


def everything() -> Region:
    """Return the region of all real numbers."""
    return Region((RealInterval(_end(Apply("neg", (INFINITY,))), _end(INFINITY), False, False),), None)


def _end(node: Node) -> Endpoint:
    rational = exact(node)
    value = Evaluation({}, real=True, log_base=None).value(node) if not _free(node) else None
    if value is None:
        raise UnreadError("a bound or member of the set has variables, words, units or names of sets")
    if isinstance(value, context(DIGITS).mpc):
        raise UnreadError("a bound or member of the set is not a real number")
    return Endpoint(node, rational, value)


def _free(node: Node) -> set[str]:
    return symbols(node, "variable") | symbols(node, "word") | symbols(node, "unit") | symbols(node, "set")


def _group(node: Compound) -> Region:
    if node.kind == "tuple" and len(node.items) == 2:
        low, high = map(_end, node.items)
        if not low.below(high):
            raise UnreadError("the lower end of the interval is not below its upper end")
        return Region((RealInterval(low, high, node.marks[0] == "[", node.marks[1] == "]"),))
    if node.kind == "set":
        points = map(_end, node.items)
        return _union([Region((RealInterval(point, point, True, True),)) for point in points])
    if node.kind == "builder":
        return _builder(node)
    if node.kind == "list" and node.items:
        parts = [_region(item) for item in node.items]
        if node.marks == "or":
            return _named(_union(parts), parts)
        met = functools.reduce(_intersection, parts)
        if node.marks == "," and not met.spans:
            met = _union(parts)
        return _named(met, parts)
    raise UnreadError(f"a {node.kind} of {len(node.items)} values is not an interval or a set of real numbers")


def _named(made: Region, parts: list[Region]) -> Region:
    names = {part.variable for part in parts}
    if len(names) != 1:
        raise UnreadError("the sets do not have the same variable")
    return Region(made.spans, names.pop())


def _builder(node: Compound) -> Region:
    bound, condition = node.items
    limited: Region = everything()
    if isinstance(bound, Relation) and bound.ops == ("\\in",):
        limited = _region(bound.sides[1])
        bound = bound.sides[0]
    if not isinstance(bound, Symbol):
        raise UnreadError("the set-builder does not begin with a variable")
    solutions = _region(condition)
    if solutions.variable != bound.name:
        raise UnreadError("the condition of the set-builder is not on its variable")
    return Region(_intersection(limited, solutions).spans)


def _relation(node: Relation) -> Region:
    if node.modulus is not None:
        raise UnreadError("a congruence cannot be read as a set")
    if node.ops in (("\\in",), ("\\notin",)):
        if not isinstance(node.sides[0], Symbol):
            raise UnreadError("the left side of `\\in` or `\\notin` is not a variable")
        inner = _region(node.sides[1])
        spans = inner.spans if node.ops == ("\\in",) else _complement(inner).spans
        return Region(spans, node.sides[0].name)
    if any(op not in _FLIPPED for op in node.ops) or set(node.ops) == {"="}:
        raise UnreadError("the relation is not an inequality")
    parts = [_inequality(a, op, b) for a, op, b in zip(node.sides, node.ops, node.sides[1:], strict=False)]
    return _named(functools.reduce(_intersection, parts), parts)


def _inequality(left: Node, op: str, right: Node) -> Region:
    """Return the region of an inequality in one variable that is linear, or bounds a distance such as |x - 1|."""
    if not _free(left):
        left, right, op = right, left, _FLIPPED[op]
    free = _free(left) | _free(right)
    if len(free) != 1 or not symbols(left, "variable"):
        raise UnreadError("an inequality must have exactly one variable, and no words, units or names of sets")
    name = next(iter(free))
    if isinstance(left, Apply) and left.name == "abs" and not _free(right) and op in ("<", "<=", ">", ">="):
        return _distance(left.args[0], op, right)
    if isinstance(left, Symbol) and not _free(right):
        return _half(_end(right), op, name)
    difference = Apply("+", (left, Apply("neg", (right,))))
    start, slope = _exact_at(difference, name, Fraction(0)), Fraction(0)
    for x in _TRIED:
        rise = (_exact_at(difference, name, x) - start) / x
        if rise == 0 or slope not in (0, rise):
            raise UnreadError("the inequality is not linear")
        slope = rise
    return _half(_end(Number(-start / slope)), op if slope > 0 else _FLIPPED[op], name)


def _exact_at(node: Node, name: str, x: Fraction) -> Fraction:
    value = exact(_replaced(node, name, Number(x)))
    if value is None:
        raise UnreadError("a part of the inequality has no rational value")
    return value


def _replaced(node: Node, name: str, value: Node) -> Node:
    if isinstance(node, Symbol):
        return value if node.name == name and node.kind == "variable" else node
    if isinstance(node, Apply):
        return Apply(node.name, tuple(_replaced(arg, name, value) for arg in node.args))
    return node


def _distance(inside: Node, op: str, limit: Node) -> Region:
    end = _end(limit)
    if not end.value > 0:
        raise UnreadError("the limit of an absolute value is zero or negative; |x| < 2 can be read, |x| < -2 cannot")
    upper = _inequality(inside, op, limit)
    lower = _inequality(inside, _FLIPPED[op], Apply("neg", (limit,)))
    return _named(_intersection(upper, lower) if op[0] == "<" else _union([upper, lower]), [upper, lower])


def _half(end: Endpoint, op: str, variable: str) -> Region:
    whole = everything().spans[0]
    below, above = RealInterval(whole.low, end, False, op == "<="), RealInterval(end, whole.high, op == ">=", False)
    if op == "=":
        return Region((RealInterval(end, end, True, True),), variable)
    if op == "!=":
        return Region((below, above), variable)
    return Region((below if op[0] == "<" else above,), variable)


def _operation(node: Apply) -> Region:
    args = node.args
    if node.name == "+":
        if len(args) != 2 or not isinstance(args[1], Apply) or args[1].name != "neg":
            raise UnreadError("this sum is not a set of real numbers: only a difference A - B of two sets can be one")
        args = (args[0], args[1].args[0])
    parts = [_region(arg) for arg in args]
    names = {part.variable for part in parts} - {None}
    if len(names) > 1:
        raise UnreadError("the sets do not have the same variable")
    if node.name == "cup":
        made = _union(parts)
    elif node.name == "cap":
        made = functools.reduce(_intersection, parts)
    else:
        made = _intersection(parts[0], _complement(parts[1]))
    return Region(made.spans, names.pop() if names else None)


def _union(parts: list[Region]) -> Region:
    spans = [span for part in parts for span in part.spans]
    if len(spans) > _MAX_PARTS:
        raise UnreadError("the set has too many intervals")
    spans.sort(key=lambda span: (context(DIGITS).mpf(span.low.value), not span.with_low))
    made: list[RealInterval] = []
    for span in spans:
        last = made[-1] if made else None
        if (
            last is None
            or last.high.below(span.low)
            or (last.high.same(span.low) and not (last.with_high or span.with_low))
        ):
            made.append(span)
        elif last.high.below(span.high) or (last.high.same(span.high) and span.with_high):
            made[-1] = RealInterval(last.low, span.high, last.with_low, span.with_high)
    return Region(tuple(made))


def _complement(part: Region) -> Region:
    whole = everything().spans[0]
    made, low, with_low = [], whole.low, False
    for span in part.spans:
        if low.below(span.low) or (low.same(span.low) and with_low and not span.with_low):
            made.append(RealInterval(low, span.low, with_low, not span.with_low))
        low, with_low = span.high, not span.with_high
    if low.below(whole.high):
        made.append(RealInterval(low, whole.high, with_low, False))
    return Region(tuple(made), part.variable)


def _intersection(left: Region, right: Region) -> Region:
    made = []
    if len(left.spans) * len(right.spans) > _MAX_PARTS:
        raise UnreadError("the set has too many intervals")
    for a in left.spans:
        for b in right.spans:
            low, with_low = (a.low, a.with_low) if b.low.below(a.low) else (b.low, b.with_low)
            if a.low.same(b.low):
                with_low = a.with_low and b.with_low
            high, with_high = (a.high, a.with_high) if a.high.below(b.high) else (b.high, b.with_high)
            if a.high.same(b.high):
                with_high = a.with_high and b.with_high
            if low.below(high) or (low.same(high) and with_low and with_high):
                made.append(RealInterval(low, high, with_low, with_high))
    return Region(tuple(made), left.variable)
