"""Values of expressions: exactly where they are rational numbers, else to fifty digits at chosen points.

Two expressions with variables count as equal when their values agree at a handful of points where both are defined:
analytic functions that agree at generic points to forty digits are practically always equal.
Numbers whose size or precision has no bound (9^9^9^9) raise `UnreadError`, and text decides.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from megarl.rewards.mathematics import words
from megarl.rewards.mathematics.tree import Apply, Node, Number, Symbol, UnreadError, symbols, walk

DIGITS = 50
_MAX_BITS = 20_000  # maximum number of bits of an exact number
_MAX_MAGNITUDE = 10_000_000  # an approximate number is between 2 to minus this power and 2 to this power
_BITS_PER_DIGIT = 3.3219
_MAX_SPREAD = 40  # bits that cancellation in a sum may cost; beyond, more digits are used
_MOST_DIGITS = 3_000
_POINTS = 6
_SCALES = (0.4, 1.0, 3.0, 9.0, 0.6, 2.0, 1.5, 0.8, 2.5)  # magnitudes of the variables at the test points
_FIRST_MIXED = 4  # at this point and later ones, variables may differ in their signs
# magnitudes at further points, for expressions whose values are whole numbers nearly everywhere
_WIDE = (57.0, 1234.0, 311.0, 98765.0)
#: Functions that are slow for large arguments.
_GROWING = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "cis", "exp", "sinh", "cosh", "tanh", "coth"])


class OutsideError(Exception):
    """A value is undefined, or not real although all variables are."""


@functools.cache
def context(digits: int) -> Any:
    """Return mpmath's functions for arithmetic with this many decimal digits."""
    from mpmath.ctx_mp import MPContext

    made = MPContext()
    made.dps = digits
    return made


def exact(node: Node) -> Fraction | None:
    """Return the exact value of an expression of rational numbers; None: it is irrational, or too large."""
    if isinstance(node, Number):
        return node.value
    if not isinstance(node, Apply):
        return None
    args = [exact(arg) for arg in node.args]
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args):
        return None
    value = _exact_operation(node.name, known)
    return value if value is not None and _bits(value) <= _MAX_BITS else None


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _exact_operation(name: str, args: list[Fraction]) -> Fraction | None:
    first = args[0]
    if name == "+" or name == "*":
        total = Fraction(name == "*")
        for arg in args:
            total = total + arg if name == "+" else total * arg
            if _bits(total) > _MAX_BITS:
                return None
        return total
    if name == "neg":
        return -first
    if name == "inv":
        return 1 / first if first else None
    if name == "%":
        return first / 100
    if name == "abs":
        return abs(first)
    if name == "^" and args[1].denominator == 1 and abs(args[1]) * _bits(first) <= _MAX_BITS:
        return first ** int(args[1]) if first or args[1] > 0 else None
    if name == "!" and first.denominator == 1 and 0 <= first <= 500:
        return Fraction(math.factorial(int(first)))
    if name == "binom" and all(arg.denominator == 1 and 0 <= arg <= 1000 for arg in args):
        return Fraction(math.comb(int(first), int(args[1])))
    if name in ("floor", "ceil"):
        return Fraction(math.floor(first) if name == "floor" else math.ceil(first))
    if name in ("max", "min"):
        return max(args) if name == "max" else min(args)
    if name in ("gcd", "lcm") and all(arg.denominator == 1 for arg in args):
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*(int(arg) for arg in args)))
    return None


class Evaluation:
    """Evaluates expressions at one point.

    Args:
        values: values of the variables and units, by name.
        real: values that are not real are outside the domain.
        log_base: base of `\\log` without a base.
        digits: decimal digits of the arithmetic.

    Attributes:
        spread: largest ratio between terms of a sum, in bits; the smaller term loses these bits.
    """

    def __init__(self, values: Mapping[str, Any], real: bool, log_base: float | None, digits: int = DIGITS) -> None:
        self.values, self.real, self.log_base = values, real, log_base
        self.ctx = context(digits)
        # bits of a value that rounding errors do not reach: all but 12 digits
        self.kept = int((digits - 12) * _BITS_PER_DIGIT)
        self.spread = 0

    def value(self, node: Node) -> Any:
        """Return the value of an expression. Raise OutsideError if it has no value at this point, and UnreadError if it
        has none at any point or may be too large."""
        if isinstance(node, Number):
            if node.base is not None:
                raise UnreadError("a number in another base cannot be computed with")
            return self.ctx.mpf(node.value.numerator) / node.value.denominator
        if isinstance(node, Symbol):
            return self._symbol(node)
        if not isinstance(node, Apply):
            raise UnreadError("this kind of answer has no numeric value")
        args = [self.value(arg) for arg in node.args]
        try:
            return self._checked(self._apply(node.name, args))
        except (ZeroDivisionError, ValueError, OverflowError, TypeError) as error:
            raise OutsideError(str(error)) from error

    def _symbol(self, node: Symbol) -> Any:
        if node.kind == "constant":
            if node.name == "infty":
                return self.ctx.inf
            return {"e": self.ctx.e, "i": self.ctx.j, "pi": self.ctx.pi}[node.name] * 1
        if node.kind == "set":
            raise UnreadError("a set has no value")
        if node.kind == "unit" and node.name in words.UNITS:
            factor, dimension = words.UNITS[node.name]
            if not dimension:
                return self.ctx.one
            return self.ctx.convert(self.values[f"unit {dimension}"]) * factor.numerator / factor.denominator
        return self.ctx.convert(self.values[f"{node.kind} {node.name}"])

    def _checked(self, value: Any) -> Any:
        ctx = self.ctx
        if ctx.isnan(value):
            raise OutsideError("the value is not a number")
        if self.real and isinstance(value, ctx.mpc):
            if value.imag != 0:
                raise OutsideError("the value is not real")
            value = value.real
        if ctx.isinf(value):
            return value
        if value and abs(ctx.mag(value)) > _MAX_MAGNITUDE:
            raise UnreadError(f"the value is not between 2^-{_MAX_MAGNITUDE} and 2^{_MAX_MAGNITUDE} in size")
        return value

    def _apply(self, name: str, args: list[Any]) -> Any:
        ctx, first = self.ctx, args[0]
        if name in ("+", "mixed"):
            return self._sum(args)
        if name == "*":
            return ctx.fprod(args)
        if name == "neg":
            return -first
        if name == "inv":
            return 1 / first
        if name == "^":
            return self._power(first, args[1])
        if name == "root":
            return self._root(first, args[1])
        if name == "%":
            return first / 100
        if name == "deg":
            return first * ctx.pi / 180
        if name == "log" and len(args) == 1:
            return self._log(first) / (1 if self.log_base is None else ctx.log(self.log_base))
        if name == "log":
            return self._log(first) / self._log(args[1])
        if name == "lg":
            return self._log(first) / ctx.log(10)
        if name == "ln":
            return self._log(first)
        if name in ("!", "!!", "binom"):
            return self._counted(name, args)
        function = self._function(name)
        if function is None or (len(args) != 1 and name not in ("max", "min")):
            raise UnreadError(f"the function {name!r} is unknown, or cannot be computed for these arguments")
        if name in _GROWING and not ctx.isinf(first) and ctx.mag(first) > 64:
            raise UnreadError(f"the argument of {name!r} is too large")
        value = function(*args)
        if name in ("floor", "ceil", "max", "min", "abs", "norm"):
            return value
        return self._settled(value, first)

    def _sum(self, args: list[Any]) -> Any:
        ctx = self.ctx
        if any(map(ctx.isinf, args)):
            return sum(args, ctx.zero)
        total = ctx.fsum(args)
        sizes = [ctx.mag(arg) for arg in args if arg]
        if not sizes:
            return total
        self.spread = max(self.spread, max(sizes) - min(sizes))
        least = max(sizes) - self.kept
        if isinstance(total, ctx.mpc):
            return ctx.mpc(*(part if part and ctx.mag(part) > least else 0 for part in (total.real, total.imag)))
        return total if total and ctx.mag(total) > least else ctx.zero

    def _settled(self, value: Any, argument: Any) -> Any:
        """Return the `value` of a function, or 0 if it is so small that it must be a rounding error.

        Raises:
            OutsideError: the value is so large for a moderate `argument` that the function has a pole there.
        """
        ctx = self.ctx
        if not value or ctx.isinf(value) or ctx.isinf(argument) or not argument or ctx.mag(argument) < -20:
            return value
        size = ctx.mag(value)
        if size > self.kept and ctx.mag(argument) < 10:
            raise OutsideError("the value is infinite at this point: the function has a pole here")
        return ctx.zero if size < -self.kept else value

    def _whole(self, value: Any, rounded: Callable[[Any], Any]) -> Any:
        """Return `rounded(value)`, a floor or a ceiling; a value that is whole up to rounding errors stays whole."""
        nearest = self.ctx.nint(value)
        distance = abs(value - nearest)
        return nearest if not distance or self.ctx.mag(distance) < -self.kept else rounded(value)

    def _function(self, name: str) -> Callable[..., Any] | None:
        ctx = self.ctx
        named = {
            "floor": lambda x: self._whole(x, ctx.floor), "ceil": lambda x: self._whole(x, ctx.ceil), "max": max,
            "min": min, "abs": abs, "norm": abs, "sgn": ctx.sign, "Re": ctx.re, "Im": ctx.im, "cis": ctx.expj,
            **{f"arc{short}": getattr(ctx, f"a{short}") for short in ("sin", "cos", "tan", "cot", "sec", "csc")},
            **{f"arc{short}": getattr(ctx, f"a{short}") for short in ("sinh", "cosh", "tanh")},
            **{f"a{short}": getattr(ctx, f"a{short}") for short in ("sin", "cos", "tan")},
        }  # fmt: skip
        if name in named:
            return named[name]
        if name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "exp"):
            return getattr(ctx, name)
        return None

    def _log(self, value: Any) -> Any:
        if value == 0:
            raise OutsideError("the logarithm of 0 is not defined")
        return self._settled(self.ctx.log(value), value)

    def _power(self, base: Any, exponent: Any) -> Any:
        ctx = self.ctx
        if ctx.isinf(exponent) or ctx.isinf(base):
            raise UnreadError("a power of infinity, or with an infinite exponent, cannot be computed")
        if ctx.mag(exponent) > 40 if exponent else False:
            raise UnreadError("an exponent is too large")
        if not base and (not exponent or ctx.re(exponent) < 0):
            raise OutsideError("0 cannot be raised to this exponent")
        if base and exponent and abs(ctx.mag(base)) * abs(ctx.re(exponent)) > _MAX_MAGNITUDE:
            raise UnreadError("a power is too large or too small")
        return base**exponent

    def _root(self, radicand: Any, degree: Any) -> Any:
        ctx = self.ctx
        if isinstance(degree, ctx.mpf) and degree == int(degree) and 0 < degree < 1000:
            if isinstance(radicand, ctx.mpf) and radicand < 0 and int(degree) % 2:
                return -ctx.root(-radicand, int(degree))
            return ctx.root(radicand, int(degree))
        return self._power(radicand, 1 / degree)

    def _counted(self, name: str, args: list[Any]) -> Any:
        if any(self.ctx.mag(arg) > 17 for arg in args if arg):
            raise UnreadError("a factorial or binomial coefficient is too large")
        if name == "binom":
            return self.ctx.binomial(*args)
        return self.ctx.factorial(args[0]) if name == "!" else self.ctx.fac2(args[0])


def evaluate(
    nodes: tuple[Node, Node], values: Mapping[str, Any], real: bool, base: float | None
) -> tuple[Any, Any, int]:
    """Return the values of two expressions at one point, and the number of digits that they were computed with. Raise
    OutsideError if one is undefined at the point, and UnreadError if one cannot be computed at any point."""
    digits = DIGITS
    while True:
        evaluations = [Evaluation(values, real, base, digits) for _ in nodes]
        left, right = (evaluation.value(node) for evaluation, node in zip(evaluations, nodes, strict=True))
        spread = max(evaluation.spread for evaluation in evaluations)
        needed = DIGITS + math.ceil(spread / _BITS_PER_DIGIT)
        if spread <= _MAX_SPREAD or needed <= digits:
            return left, right, digits
        digits = 100 * math.ceil((needed + 20) / 100)
        if digits > _MOST_DIGITS:
            raise UnreadError("the terms of a sum differ too much in size")


def unknowns(*nodes: Node) -> list[str]:
    """Return the names of everything in the expressions that needs a value before they can be evaluated: variables,
    words of the text that stand for a value, and dimensions of units."""
    names = set()
    for node in nodes:
        names |= {f"variable {name}" for name in symbols(node, "variable")}
        names |= {f"word {name}" for name in symbols(node, "word")}
        for name in symbols(node, "unit"):
            names.add(f"unit {words.UNITS[name][1]}" if name in words.UNITS else f"unit {name}")
    return sorted(names)


def points(names: list[str], wide: bool = False) -> list[dict[str, Any]]:
    """Return several sets of pseudo-random values for the unknowns `names`; with `wide`, also large values. Units such
    as cm also count as unknowns, and their values are always positive."""
    ctx = context(DIGITS)
    made = []
    for index, scale in enumerate(_SCALES + (_WIDE if wide else ())):
        point = {}
        for name in names:
            seed = zlib.crc32(f"{name} {index}".encode())
            size = ctx.mpf(seed % 99_991 + 7) / 99_991 / 2 + ctx.mpf(3) / 4  # from 0.75 to about 1.25
            negative = index >= _FIRST_MIXED and _is_negative(name, index - _FIRST_MIXED)
            point[name] = size * (-scale if negative else scale)
        made.append(point)
    return made


def _is_negative(name: str, index: int) -> bool:
    """Return whether a variable is negative at a point; the first two points have opposite signs."""
    bits = zlib.crc32(name.encode()) >> 8
    return not name.startswith("unit") and bool((bits ^ 1 if index == 1 else bits >> index) & 1)


def has_steps(*nodes: Node) -> bool:
    """Return whether one of the expressions has a floor, a ceiling, a sign or an absolute value, at which its value
    may jump or change direction."""
    return any(isinstance(part, Apply) and part.name in ("floor", "ceil", "sgn", "abs") for part in walk(*nodes))


def whole_points(names: list[str]) -> list[dict[str, Any]]:
    """Return whole numbers as points, for expressions that are defined only there, as `(-1)^n`."""
    ctx = context(DIGITS)
    return [
        {name: ctx.mpf(2 + (zlib.crc32(name.encode()) + 3 * index + index * index) % 11) for name in names}
        for index in range(_POINTS)
    ]


def is_complex(*nodes: Node) -> bool:
    """Return whether one of the expressions contains the imaginary unit (or `cis`)."""
    return any(
        part == Symbol("i", "constant") or (isinstance(part, Apply) and part.name == "cis") for part in walk(*nodes)
    )


def log_bases(*nodes: Node) -> tuple[float | None, ...]:
    """Return the possible bases of a `\\log` without a base in these expressions: None (natural logarithm) or 10."""
    bare = any(isinstance(part, Apply) and part.name == "log" and len(part.args) == 1 for part in walk(*nodes))
    return (None, 10) if bare else (None,)


def near(left: Any, right: Any, digits: int = DIGITS) -> bool:
    """Return whether two values agree to all but the last ten digits."""
    ctx = context(digits)
    if ctx.isinf(left) or ctx.isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= ctx.mpf(10) ** (10 - digits) * max(abs(left), abs(right)))
