"""Nodes of an answer's tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias


class UnreadError(Exception):
    """An answer is not mathematics that this package can read, so its text is compared."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number.

    Attributes:
        value: exact value.
        places: decimal places if the number is written as a decimal; None: an exact number.
        base: base if the number is written with a base.
    """

    value: Fraction
    places: int | None = None
    base: int | None = None


@dataclass(frozen=True, slots=True)
class Symbol:
    """A letter, a constant, a unit or a word.

    Attributes:
        name: name that is unique among the symbols of its kind.
        kind: variables have any value; constants are e, i, pi and infinity; units have a dimension; words stand for
            themselves, `dots` among them.
    """

    name: str
    kind: Literal["variable", "constant", "unit", "word", "set"] = "variable"


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation (`+`, `*`, `inv`, `^`, `neg`, `pm`, `cup`, ...) or a function on its arguments."""

    name: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Compound:
    """Several values together, such as a list, a tuple or a matrix.

    Attributes:
        kind: `list` has no brackets; `rows` of a matrix and of cases are groups of kind `row`.
        items: the values.
        marks: brackets of a tuple, separators of a list (`,`, `and`, `or`), the environment of rows.
    """

    kind: Literal["list", "tuple", "set", "builder", "ratio", "rows", "row"]
    items: tuple[Node, ...]
    marks: str = ""


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain `sides[0] ops[0] sides[1] ops[1] ...`, with the modulus of a congruence."""

    sides: tuple[Node, ...]
    ops: tuple[str, ...]
    modulus: Node | None = None


Node: TypeAlias = Number | Symbol | Apply | Compound | Relation


def children(node: Node) -> tuple[Node, ...]:
    """Return the direct child nodes."""
    if isinstance(node, Apply):
        return node.args
    if isinstance(node, Compound):
        return node.items
    if isinstance(node, Relation):
        return node.sides if node.modulus is None else (*node.sides, node.modulus)
    return ()


def mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return the node with `change` applied to each child; the modulus of a relation stays."""
    if isinstance(node, Apply):
        return Apply(node.name, tuple(map(change, node.args)))
    if isinstance(node, Compound):
        return Compound(node.kind, tuple(map(change, node.items)), node.marks)
    if isinstance(node, Relation):
        return Relation(tuple(map(change, node.sides)), node.ops, node.modulus)
    return node


def walk(*nodes: Node) -> Iterator[Node]:
    """Yield these nodes of expression trees and all nodes below them."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(children(node))


def symbols(node: Node, kind: str) -> set[str]:
    """Return the names of the symbols of one kind (such as `constant`) in an expression."""
    return {part.name for part in walk(node) if isinstance(part, Symbol) and part.kind == kind}
