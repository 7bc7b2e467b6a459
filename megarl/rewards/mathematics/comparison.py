"""Equality of two trees."""

from __future__ import annotations

from megarl.rewards.mathematics import words
from megarl.rewards.mathematics.equality import equal_expressions, proportional, rounds_to
from megarl.rewards.mathematics.regions import region
from megarl.rewards.mathematics.tree import Apply, Compound, Node, Relation, Symbol, UnreadError, mapped, symbols, walk
from megarl.rewards.mathematics.values import OutsideError, exact

_MAX_UNORDERED = 40  # longer lists are only compared in order
_OTHER = frozenset({"vmatrix", "Vmatrix", "cases"})  # LaTeX environments that have rows but are not matrices
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "\\subset": "\\supset", "\\supset": "\\subset",
           "\\subseteq": "\\supseteq", "\\supseteq": "\\subseteq", "\\in": "\\ni", "\\ni": "\\in"}  # fmt: skip
_SYMMETRIC = frozenset({"=", "!=", "\\approx", "\\sim", "\\simeq", "\\cong", "\\perp", "\\parallel", "\\equiv"})


def same(reference: Node, answer: Node) -> bool:
    """Return whether two answers are the same, whatever their form. Raise UnreadError if one of them has a value that
    may be too large to compute."""
    return _same(normal(reference), normal(answer))


def normal(node: Node) -> Node:
    """Return a tree in normal form: signs `\\pm` become lists, a system becomes a list of its lines."""
    if isinstance(node, Compound) and node.kind in ("tuple", "row") and _has_signs(node):
        return _both_signs(node)
    if isinstance(node, Compound):
        items = [normal(item) for item in node.items]
        if node.kind == "rows" and node.marks in ("cases", "array", "matrix"):
            cells = [row.items[0] for row in items if isinstance(row, Compound) and len(row.items) == 1]
            if len(cells) == len(items) and all(isinstance(cell, Relation) for cell in cells):
                return normal(Compound("list", tuple(cells), ","))
        if node.kind in ("list", "set"):
            return Compound(node.kind, tuple(_spread(node, items)), node.marks)
        made: Node = Compound(node.kind, tuple(items), node.marks)
    elif isinstance(node, Relation):
        shorter = _without_decimal(node)
        if shorter != node:
            return normal(shorter)
        if (
            len(node.ops) > 1
            and set(node.ops) == {"="}
            and all(map(_is_name, node.sides[:-1]))
            and not _is_name(node.sides[-1])
        ):
            lines = tuple(Relation((side, node.sides[-1]), ("=",)) for side in node.sides[:-1])  # for example x = y = 2
            return normal(Compound("list", lines, ","))
        made = node
    else:
        made = _scaled(node)
    if isinstance(made, Compound) and made.kind == "builder":
        return made
    return _both_signs(made) if _has_signs(made) else made


def _without_decimal(node: Relation) -> Node:
    """Drop an equation's decimal approximation if it is correct: `\\frac13 \\approx 0.333` is a third."""
    if node.ops[-1:] != ("\\approx",) or node.modulus is not None or (len(node.sides) == 2 and _is_name(node.sides[0])):
        return node
    try:
        right = rounds_to(node.sides[-2], node.sides[-1])
    except (UnreadError, OutsideError):
        return node
    if not right:
        return node
    return Relation(node.sides[:-1], node.ops[:-1]) if len(node.sides) > 2 else node.sides[0]


def _scaled(node: Node) -> Node:
    """Multiply the number into the entries of `2 * matrix` or `2 * vector`; return other expressions unchanged."""
    if not isinstance(node, Apply) or node.name not in ("*", "neg"):
        return node
    grouped = [arg for arg in node.args if isinstance(arg, Compound)]
    if len(grouped) != 1:
        return node
    group = grouped[0]
    if group.kind not in ("rows", "tuple") or group.marks not in ("()", *words.MATRICES - _OTHER):
        return node

    def scaled(item: Node) -> Node:
        return Apply(node.name, tuple(item if arg is group else arg for arg in node.args))

    if group.kind == "tuple":
        return Compound("tuple", tuple(map(scaled, group.items)), group.marks)
    rows_made = (Compound("row", tuple(map(scaled, row.items))) for row in group.items if isinstance(row, Compound))
    return Compound("rows", tuple(rows_made), group.marks)


def _has_signs(node: Node) -> bool:
    return any(isinstance(part, Apply) and part.name in ("pm", "mp") for part in walk(node))


def _both_signs(node: Node) -> Node:
    return Compound("list", (_signed(node, "pm"), _signed(node, "mp")), "or")


def _signed(node: Node, plus: str) -> Node:
    """Return `node` with every plus-minus sign replaced by its upper (`plus` is pm) or lower (mp) sign."""
    made = mapped(node, lambda child: _signed(child, plus))
    if isinstance(made, Apply) and made.name in ("pm", "mp"):
        return made.args[0] if made.name == plus else Apply("neg", made.args)
    return made


def _spread(node: Compound, items: list[Node]) -> list[Node]:
    """Flatten lists inside a list; in `x = 1, 2` every item is a value of x."""
    made: list[Node] = []
    for item in items:
        nested = (
            isinstance(item, Compound)
            and item.kind == "list"
            and item.marks in (node.marks, "or")
            and node.kind != "builder"
        )
        made += item.items if nested and isinstance(item, Compound) else [item]
    first = made[0] if made else None
    if isinstance(first, Relation) and first.ops == ("=",) and not any(isinstance(item, Relation) for item in made[1:]):
        return [first, *(Relation((first.sides[0], item), ("=",)) for item in made[1:])]
    return made


def _same(a: Node, b: Node) -> bool:
    if a == b:
        return True
    if isinstance(a, Compound) and isinstance(b, Compound) and _groups(a, b):
        return True
    if isinstance(a, Relation) and isinstance(b, Relation):
        if _relations(a, b):
            return True
    elif isinstance(a, Relation) or isinstance(b, Relation):
        relation, other = (a, b) if isinstance(a, Relation) else (b, a)
        assert isinstance(relation, Relation)
        if _is_value_of(relation, other):
            return True
    if _converted(a, b) or _converted(b, a):
        return True
    if not isinstance(a, Compound | Relation) and not isinstance(b, Compound | Relation) and _expressions(a, b):
        return True
    first, second = region(a), region(b)
    return first is not None and second is not None and first.same(second)


def _expressions(a: Node, b: Node) -> bool:
    try:
        if equal_expressions(a, b):
            return True
    except (UnreadError, OutsideError):
        pass
    if isinstance(a, Apply) and isinstance(b, Apply) and a.name == b.name and len(a.args) == len(b.args):
        if a.name in ("cup", "cap", "gcd", "lcm", "max", "min"):
            return _in_any_order(a.args, b.args)
        structured = any(isinstance(part, Compound) for part in walk(a, b))
        return (structured or a.name == "\\") and all(map(_same, a.args, b.args))
    return False


def _groups(a: Compound, b: Compound) -> bool:
    kinds, dotted = {a.kind, b.kind}, _has_dots(a) or _has_dots(b)
    if kinds == {"list"}:
        if dotted:
            return _in_order(a.items, b.items)
        if a.marks != b.marks and not _may_be_marked(a, b):
            return False
        named, others = (a, b) if _names_many(a) else (b, a)
        if _names_many(named) and not any(isinstance(item, Relation) for item in others.items):
            return _in_order(a.items, b.items)  # for example, x = 1, y = 2 is not 2, 1
        return _in_any_order(a.items, b.items)
    if kinds == {"set"} and dotted:
        return _in_order(a.items, b.items)
    if kinds == {"set"} or (kinds == {"list", "set"} and not (dotted or _names_many(a) or _names_many(b))):
        return _in_any_order(_distinct(a.items), _distinct(b.items))
    if kinds == {"tuple"}:
        return a.marks == b.marks and _in_order(a.items, b.items)
    if kinds == {"builder"}:
        return _builders(a, b)
    if kinds == {"ratio"}:
        return _ratios(a, b)
    if kinds == {"rows"}:
        compared = _in_any_order if a.marks == "cases" else _in_order
        return _matrix_kind(a) == _matrix_kind(b) and compared(a.items, b.items)
    return kinds == {"row"} and _in_order(a.items, b.items)


def _may_be_marked(a: Compound, b: Compound) -> bool:
    """Return whether two lists may be equal although different words separate their items (a comma, `and` or `or`).

    `2 and 5` and `2 or 5` both list the two solutions, so they may be equal.
    """
    items = (*a.items, *b.items)
    # inequalities are compared only as sets, by `region`
    bounded = any(isinstance(item, Relation) and item.ops != ("=",) for item in items)
    if "or" in (a.marks, b.marks) and (bounded or _names_many(a) or _names_many(b)):
        return False
    if {a.marks, b.marks} != {"and", "or"}:
        return True
    return not any(isinstance(item, Relation | Symbol) for item in items)


def _names_many(group: Compound) -> bool:
    sides = [item.sides[0] for item in group.items if isinstance(item, Relation) and item.ops == ("=",)]
    letters = {side.name.partition("_")[0] if isinstance(side, Symbol) else "" for side in sides}
    # `x_1` and `x_2` are two solutions for x, so they count as one name.
    return len(sides) == len(group.items) > 1 and len(set(sides)) > 1 and len(letters) > 1


def _matrix_kind(node: Compound) -> str:
    return node.marks if node.marks in _OTHER else "matrix"


def _has_dots(node: Compound) -> bool:
    return any(item == Symbol("dots", "word") for item in node.items)


def _distinct(items: tuple[Node, ...]) -> tuple[Node, ...]:
    if len(items) > _MAX_UNORDERED:
        return items
    made: list[Node] = []
    for item in items:
        if not any(_same(item, other) for other in made):
            made.append(item)
    return tuple(made)


def _in_order(a: tuple[Node, ...], b: tuple[Node, ...]) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


def _in_any_order(a: tuple[Node, ...], b: tuple[Node, ...]) -> bool:
    if len(a) != len(b):
        return False
    if len(a) > _MAX_UNORDERED:
        return all(map(_same, a, b))
    left = list(b)
    for item in a:
        place = next((index for index, other in enumerate(left) if _same(item, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _builders(a: Compound, b: Compound) -> bool:
    names, others = _bound(a), _bound(b)
    if names != others and len(names) == len(others) == 1:
        name, other = names.pop(), others.pop()
        if name in symbols(b, "variable"):
            return False
        b = _renamed(b, other, name)  # type: ignore[assignment]
    return all(map(_same, a.items, b.items))


def _bound(node: Compound) -> set[str]:
    first = node.items[0]
    return symbols(first.sides[0] if isinstance(first, Relation) else first, "variable")


def _renamed(node: Node, old: str, new: str) -> Node:
    return Symbol(new) if node == Symbol(old) else mapped(node, lambda child: _renamed(child, old, new))


def _ratios(a: Compound, b: Compound) -> bool:
    if len(a.items) != len(b.items):
        return False
    for x, y in zip(a.items[1:], b.items[1:], strict=True):
        if not _expressions(Apply("*", (a.items[0], y)), Apply("*", (b.items[0], x))):
            return False
    return all(exact(item) != 0 for item in (*a.items, *b.items))


def _converted(a: Node, b: Node) -> bool:
    """Return whether `a` is a list, set, ratio or the like that equals `b` in another form, such as 1:2 and 1/2."""
    if not isinstance(a, Compound):
        return False
    if a.kind in ("set", "list") and len(a.items) == 1 and not isinstance(b, Compound):
        return _same(a.items[0], b)
    if a.kind == "ratio" and len(a.items) == 2 and not isinstance(b, Compound | Relation):
        return _expressions(Apply("*", (a.items[0], Apply("inv", (a.items[1],)))), b)
    if a.kind == "list" and (values := _values_of_one_name(a.items)) is not None and not isinstance(b, Relation):
        others = b.items if isinstance(b, Compound) and b.kind in ("list", "set") else ()
        return not any(isinstance(item, Relation) for item in others) and _in_any_order(values, others)
    if a.kind == "list" and a.marks == "and" and isinstance(b, Apply) and b.name == "mixed":
        return _in_order(a.items, b.args)  # "5 feet and 3 inches" as a list against 5 ft 3 in as a mixed quantity
    if not isinstance(b, Compound):
        return a.kind == "list" and isinstance(b, Relation) and b.ops == ("=",) and _tuple_equation(a, b)
    if a.kind == "list" and a.marks in (",", "and") and b.kind == "tuple" and b.marks == "()":
        values = _named_values(a.items) if all(isinstance(item, Relation) for item in a.items) else a.items
        return values is not None and _in_order(values, b.items)
    if a.kind == "rows" and b.kind == "tuple" and b.marks == "()" and _matrix_kind(a) == "matrix":
        rows = [row.items if isinstance(row, Compound) else (row,) for row in a.items]
        cells = rows[0] if len(rows) == 1 else tuple(row[0] for row in rows if len(row) == 1)
        return len(cells) >= len(rows) and _in_order(cells, b.items)
    return False


def _values_of_one_name(items: tuple[Node, ...]) -> tuple[Node, ...] | None:
    equations = [item for item in items if isinstance(item, Relation) and item.ops == ("=",)]
    names = {equation.sides[0] for equation in equations}
    if len(equations) < len(items) or len(names) != 1 or not _is_name(names.pop()):
        return None
    return tuple(equation.sides[1] for equation in equations)


def _named_values(items: tuple[Node, ...]) -> tuple[Node, ...] | None:
    """Return the values 1 and 2 of `x = 1, y = 2` if the names are in alphabetical order; else None."""
    names, values = [], []
    for item in items:
        if not isinstance(item, Relation) or item.ops != ("=",) or not isinstance(item.sides[0], Symbol):
            return None
        names.append(item.sides[0].name)
        values.append(item.sides[1])
    return tuple(values) if names == sorted(set(names)) else None


def _tuple_equation(lines: Compound, equation: Relation) -> bool:
    """Return whether an equation of tuples agrees with a list of equations: `(x, y) = (1, 2)` and `x = 1, y = 2`."""
    left, right = equation.sides
    if not (isinstance(left, Compound) and isinstance(right, Compound) and left.kind == right.kind == "tuple"):
        return False
    if len(left.items) != len(right.items):
        return False
    pairs = tuple(Relation((x, y), ("=",)) for x, y in zip(left.items, right.items, strict=True))
    return _in_any_order(lines.items, pairs)


# -- relations


def _is_name(node: Node) -> bool:
    if isinstance(node, Symbol):
        return node.kind in ("variable", "word", "set")
    if isinstance(node, Apply) and node.name in ("abs", "norm", "det"):
        inner = node.args[0]  # |AB| and |\\vec{a}| are lengths; |x| = 3 means x is 3 or -3
        return isinstance(inner, Symbol) and (inner.kind == "word" or not inner.name.islower() or " " in inner.name)
    if not isinstance(node, Compound) or node.kind != "tuple":
        return False
    letters = [item.name for item in node.items if isinstance(item, Symbol) and _is_name(item)]
    # Single letters are the name of a tuple only in alphabetical order: after (y, x), the values are in another order.
    ordered = any(len(name) != 1 for name in letters) or letters == sorted(letters)
    return len(letters) == len(node.items) and ordered


def _same_name(a: Node, b: Node) -> bool:
    """Return whether two names are the same: `y` and `y(x)` are, `f(2)` and `f(3)` are not."""
    if a == b or not (isinstance(a, Symbol) and isinstance(b, Symbol)):
        return a == b
    short, long = sorted((a.name, b.name), key=len)
    return len(long) == len(short) + 3 and long[:-3] == short and long[-3] + long[-1] == "()" and long[-2].isalpha()


def _is_value_of(relation: Relation, value: Node) -> bool:
    """Return whether a relation only gives a name to the value: `x = 5` for 5, `x \\in (1, 2)` for (1, 2)."""
    if relation.modulus is not None or not (set(relation.ops) <= {"=", "\\approx"} or relation.ops == ("\\in",)):
        return False
    sides = relation.sides
    if not _is_name(sides[0]) and _is_name(sides[-1]) and len(sides) == 2 and relation.ops == ("=",):
        sides = (sides[1], sides[0])
    named = _is_name(sides[0]) or (
        isinstance(value, Compound) and value.kind == "rows" and not isinstance(sides[0], Compound)
    )
    listed = isinstance(sides[1], Compound) and sides[1].kind == "list"
    rest = sides[1:] if named and not listed else sides
    if rest == sides and (len(sides) < 2 or any(symbols(side, "variable") for side in sides)):
        return False
    return all(_same(side, value) for side in rest)


def _relations(a: Relation, b: Relation) -> bool:
    if (a.modulus is None) != (b.modulus is None):
        return False
    if a.modulus is not None and b.modulus is not None:
        return _same(a.modulus, b.modulus) and (_congruent(a, b) or _congruent(a, _turned(b)))
    if _side_by_side(a, b) or _side_by_side(a, _turned(b)):
        return True
    single = len(a.ops) == len(b.ops) == 1 and set(a.ops + b.ops) <= {"=", "!=", "<", ">", "<=", ">="}
    return single and _multiples(a, b)


def _turned(node: Relation) -> Relation:
    if not all(op in _TURNED or op in _SYMMETRIC for op in node.ops):
        return node
    return Relation(node.sides[::-1], tuple(_TURNED.get(op, op) for op in node.ops[::-1]), node.modulus)


def _side_by_side(a: Relation, b: Relation) -> bool:
    return a.ops == b.ops and all(map(_same, a.sides, b.sides))


def _multiples(a: Relation, b: Relation) -> bool:
    if a.ops == b.ops == ("=",):
        a, b = _name_first(a), _name_first(b)
        if _is_name(a.sides[0]) and _same_name(a.sides[0], b.sides[0]):
            return _same(a.sides[1], b.sides[1])
    upright = [_turned(node) if node.ops[0] in (">", ">=") else node for node in (a, b)]
    if upright[0].ops != upright[1].ops:
        return False
    first, second = (Apply("+", (node.sides[0], Apply("neg", (node.sides[1],)))) for node in upright)
    try:
        return proportional(first, second, positive=upright[0].ops[0] in ("<", "<="))
    except (UnreadError, OutsideError):
        return False


def _name_first(node: Relation) -> Relation:
    return Relation(node.sides[::-1], node.ops) if _is_name(node.sides[1]) and not _is_name(node.sides[0]) else node


def _congruent(a: Relation, b: Relation) -> bool:
    """Return whether the sides agree, where whole numbers may differ by multiples of the modulus."""
    assert a.modulus is not None
    modulus = exact(a.modulus)
    if modulus is None or a.ops != b.ops:
        return _side_by_side(a, b)
    for x, y in zip(a.sides, b.sides, strict=True):
        left, right = exact(x), exact(y)
        difference = None if left is None or right is None else left - right
        multiple = difference is not None and bool(modulus) and (difference / modulus).denominator == 1
        if difference != 0 and not multiple and not _same(x, y):
            return False
    return True
