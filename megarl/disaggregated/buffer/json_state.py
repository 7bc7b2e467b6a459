"""Objects of a few known classes as JSON and back: tuples stay tuples, and what is shared stays shared."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

_AGAIN = "&"  # followed by the number of an object that came before


def freeze(value: Any, classes: Iterable[type]) -> Any:
    """`value` as JSON: plain values, lists, tuples, sets, dictionaries, and objects of `classes`; no cycles.

    An object is its attributes (`vars`), a named tuple its items. What is not a plain value is a list after a word
    that says what it is; its second appearance is a reference to the first.

    Raises:
        TypeError: something is of another class.
    """
    names = {one: one.__name__ for one in classes}
    seen: dict[int, int] = {}

    def walk(one: Any) -> Any:
        kind = type(one)
        if one is None or kind in (str, int, float, bool):
            return one
        if id(one) in seen:
            return [_AGAIN, seen[id(one)]]
        if kind is list or kind is tuple:
            data = [kind.__name__, *map(walk, one)]
        elif kind is set:
            data = ["set", *map(walk, sorted(one, key=repr))]
        elif kind is dict:
            data = ["dict", *map(walk, chain.from_iterable(one.items()))]
        elif kind in names:
            items = one if isinstance(one, tuple) else chain.from_iterable(vars(one).items())
            data = [names[kind], *map(walk, items)]
        else:
            raise TypeError(f"a {kind.__qualname__} cannot be frozen; known: {', '.join(names.values())}")
        seen[id(one)] = len(seen)
        return data

    return walk(value)


def thaw(data: Any, classes: Iterable[type]) -> Any:
    """Rebuild what `freeze` was given, of new objects; classes are not called, their attributes are set."""
    named = {one.__name__: one for one in classes}
    seen: list[Any] = []

    def walk(one: Any) -> Any:
        if not isinstance(one, list):
            return one
        if one[0] == _AGAIN:
            return seen[one[1]]
        kind, items = one[0], [walk(item) for item in one[1:]]
        made: Any
        if kind == "list":
            made = items
        elif kind == "tuple":
            made = tuple(items)
        elif kind == "set":
            made = set(items)
        elif kind == "dict":
            made = dict(zip(items[::2], items[1::2], strict=True))
        elif issubclass(named[kind], tuple):
            made = named[kind](*items)
        else:
            made = object.__new__(named[kind])
            vars(made).update(zip(items[::2], items[1::2], strict=True))
        seen.append(made)
        return made

    found = walk(data)
    seen.clear()  # `walk` knows itself, so that it goes only with the next collection of garbage, and what it holds
    return found
