"""Comparison of two expressions: equal values, or one a multiple of the other."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from megarl.rewards.mathematics.tree import Apply, Compound, Node, Number, Symbol, UnreadError, mapped, symbols, walk
from megarl.rewards.mathematics.values import (
    DIGITS,
    OutsideError,
    context,
    evaluate,
    exact,
    has_steps,
    is_complex,
    log_bases,
    near,
    points,
    unknowns,
    whole_points,
)

_RELATIVE = Fraction(1, 10**6)  # relative distance that a decimal may have from the value that it stands for
_ENOUGH = 2  # minimum number of test points at which values are compared


def equal_expressions(reference: Node, answer: Node) -> bool:
    """Return whether both have the same value; a unit, a percent or a degree sign may be missing in one of them. Raise
    UnreadError if a value may be too large to compute, or a part has no value."""
    if reference == answer:
        return True
    if _has_base(reference) or _has_base(answer):
        return False  # with a base only the same expression is equal: a number in another base is not the answer
    signs = {_sign(reference), _sign(answer)}
    if len(signs) == 2 and "" in signs:
        marked, bare = (reference, answer) if _sign(reference) else (answer, reference)
        if not _has_units(bare):
            return _values_equal(_unmarked(marked), bare) or _values_equal(marked, bare)
    with_units = _has_units(reference), _has_units(answer)
    if with_units == (False, False):
        return _values_equal(reference, answer)
    if with_units == (True, True):
        first, second = _without_units(reference), _without_units(answer)
        if first is not None and second is not None and _values_equal(_only_units(reference), _only_units(answer)):
            return _values_equal(first, second)
        return _values_equal(reference, answer)
    quantity, number = (reference, answer) if with_units[0] else (answer, reference)
    stripped = _without_units(quantity)
    if stripped is not None and _values_equal(stripped, number):
        return True
    return bool(symbols(number, "variable")) and _values_equal(_units_as_letters(quantity), number)


# -- units


def _has_base(node: Node) -> bool:
    return any(isinstance(part, Number) and part.base is not None for part in walk(node))


def _sign(node: Node) -> str:
    if isinstance(node, Apply):
        if node.name == "neg":
            return _sign(node.args[0])
        return node.name if node.name in ("%", "deg") else ""
    return ""


def _unmarked(node: Node) -> Node:
    assert isinstance(node, Apply)
    return Apply("neg", (_unmarked(node.args[0]),)) if node.name == "neg" else node.args[0]


def _has_units(node: Node) -> bool:
    return bool(symbols(node, "unit"))


def _is_pure_unit(node: Node) -> bool:
    if isinstance(node, Symbol):
        return node.kind == "unit"
    if isinstance(node, Apply):
        if node.name == "^":
            return _is_pure_unit(node.args[0]) and isinstance(exact(node.args[1]), Fraction)
        return node.name in ("*", "inv") and all(_is_pure_unit(arg) or arg == Number(Fraction(1)) for arg in node.args)
    return False


def _without_units(node: Node) -> Node | None:
    """Return a quantity without its unit; None if it is not a number times a unit."""
    if isinstance(node, Apply) and node.name == "neg":
        inner = _without_units(node.args[0])
        return None if inner is None else Apply("neg", (inner,))
    if isinstance(node, Apply) and node.name == "+" and not any(map(_has_units, node.args[:-1])):
        inner = _without_units(node.args[-1])  # for example \frac{\pi}{4} - \frac12 cm^2
        return None if inner is None else Apply("+", (*node.args[:-1], inner))
    if not isinstance(node, Apply) or node.name != "*":
        return None
    factors: list[Node] = []
    for arg in node.args:
        if _is_pure_unit(arg):
            continue
        inner = _without_units(arg) if _has_units(arg) else arg
        if inner is None:
            return None
        factors.append(inner)
    return None if not factors else factors[0] if len(factors) == 1 else Apply("*", tuple(factors))


def _only_units(node: Node) -> Node:
    if isinstance(node, Apply) and node.name in ("neg", "+"):
        return _only_units(node.args[-1])
    assert isinstance(node, Apply)
    units = [arg if _is_pure_unit(arg) else _only_units(arg) for arg in node.args if _has_units(arg)]
    return Apply("*", tuple(units))


def _units_as_letters(node: Node) -> Node:
    if isinstance(node, Symbol) and node.kind == "unit" and len(node.name) == 1:
        return Symbol(node.name)
    return mapped(node, _units_as_letters)


# -- equality of values


def _values_equal(reference: Node, answer: Node) -> bool:
    left, right = exact(reference), exact(answer)
    steps = [step for step in (_step(reference), _step(answer)) if step is not None]
    if left is not None and right is not None:
        return left == right or (bool(steps) and _rounded(left, right, max(steps)))
    names = unknowns(reference, answer)
    if names:
        return any(_agree(reference, answer, names, base) for base in log_bases(reference, answer))
    return any(_constants_equal(reference, answer, steps, base) for base in log_bases(reference, answer))


def _step(node: Node) -> Fraction | None:
    """Return the place value of the last digit of a number written as a decimal, such as 1/100 for 3.14 and 10 for
    3.14 * 10^3; None for other expressions.
    """
    if isinstance(node, Number):
        return None if node.places is None else Fraction(1, 10) ** node.places
    if not isinstance(node, Apply):
        return None
    if node.name in ("neg", "%"):
        step = _step(node.args[0])
        return step / 100 if step is not None and node.name == "%" else step
    if node.name == "*" and len(node.args) == 2:
        power, ten = node.args[1], Number(Fraction(10))
        step, scale = _step(node.args[0]), exact(power)
        is_power_of_ten = isinstance(power, Apply) and power.name == "^" and power.args[0] == ten
        if step is not None and scale is not None and is_power_of_ten:
            return step * abs(scale)
    return None


def _rounded(reference: Fraction, answer: Fraction, step: Fraction) -> bool:
    """Return whether the decimal `answer` is a rounding of `reference`: within `step` of it and within a small relative
    error."""
    distance = abs(reference - answer)
    return distance < step and distance <= _RELATIVE * max(abs(reference), abs(answer))


def rounds_to(value: Node, decimal: Node) -> bool:
    """Return whether a decimal equals the value of an expression without variables, up to the decimal's last place."""
    step = _step(decimal)
    if step is None or unknowns(value, decimal):
        return False
    left, right, digits = evaluate((value, decimal), {}, True, None)
    return not context(digits).isinf(left) and abs(_fraction(left) - _fraction(right)) <= step


def _constants_equal(reference: Node, answer: Node, steps: list[Fraction], base: float | None) -> bool:
    try:
        left, right, digits = evaluate((reference, answer), {}, False, base)
    except OutsideError as error:
        raise UnreadError(str(error)) from error
    if near(left, right, digits):
        return True
    ctx = context(digits)
    if not steps or ctx.isinf(left) or ctx.isinf(right) or isinstance(left, ctx.mpc) or isinstance(right, ctx.mpc):
        return False
    return _rounded(_fraction(left), _fraction(right), max(steps))


def _fraction(value: Any) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    return Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** int(exponent)


def _agree(reference: Node, answer: Node, names: list[str], base: float | None) -> bool:
    compared = 0
    for left, right, digits in _values(reference, answer, names, base):
        if not near(left, right, digits):
            return False
        compared += 1
    if compared < _ENOUGH:
        raise UnreadError("too few values of the variables were found for which both answers are defined")
    return True


def _values(
    reference: Node, answer: Node, names: list[str], base: float | None, least: int = _ENOUGH
) -> Iterator[tuple[Any, Any, int]]:
    """Yield the values of both expressions, with the number of reliable digits, at points where both are defined: real
    points, or if there are fewer than `least` of these, integers, or else complex points."""
    complex_ = is_complex(reference, answer)
    attempts = [(points(names, has_steps(reference, answer)), not complex_)]
    if not complex_:
        attempts += [(whole_points(names), True), (points(names), False)]
    for at, real in attempts:
        values = []
        for point in at:
            try:
                values.append(evaluate((reference, answer), point, real, base))
            except OutsideError:
                continue
        if len(values) >= least:
            yield from values
            return


def proportional(first: Node, second: Node, positive: bool) -> bool:
    """Return whether `first = 0` and `second = 0` are the same up to a constant factor, which must be `positive`
    between inequalities."""
    if any(isinstance(part, Compound) for part in walk(first, second)):
        return False
    names = unknowns(first, second)
    if not any(not name.startswith("unit") for name in names) or unknowns(first) != unknowns(second):
        return False
    return any(_is_multiple(first, second, names, base, positive) for base in log_bases(first, second))


def _is_multiple(first: Node, second: Node, names: list[str], base: float | None, positive: bool) -> bool:
    ratios, least = [], 0
    for left, right, digits in _values(first, second, names, base, _ENOUGH + 1):
        if not left and not right:  # the point solves both equations
            continue
        if not left or not right:
            return False
        ratios.append(left / right)
        least = min(least or digits, digits)
    ctx = context(least or DIGITS)
    ratios = [ctx.convert(ratio) for ratio in ratios]
    # The first ratio is the factor. An equation that every point solves has no ratios; it is a multiple of no other.
    if len(ratios) <= _ENOUGH or any(ctx.isinf(ratio) or ctx.isnan(ratio) for ratio in ratios):
        return False
    if not all(near(ratio, ratios[0], least) for ratio in ratios):
        return False
    return not positive or (isinstance(ratios[0], ctx.mpf) and bool(ratios[0] > 0))
