"""What is frozen as JSON is the same when it is thawed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from megarl.disaggregated.buffer.json_state import freeze, thaw


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Box:
    inside: Any


CLASSES = (Pair, Box)


def through(value: Any) -> Any:
    return thaw(json.loads(json.dumps(freeze(value, CLASSES))), CLASSES)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 0.5, "x", ["list"], ["&", 0]],
        {("team", 0): (1, (2,)), 3: {1, 2}, "empty": [(), {}, set(), []]},
        {("b", 1), ("a", 2)},
        Box(Pair([Box(None)], {"k": Box({1})})),
    ],
)
def test_every_kind_comes_back(value: Any) -> None:
    found = through(value)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, set)


def test_what_is_shared_stays_shared_and_what_is_equal_stays_apart() -> None:
    one, other = Box(1), Box(1)
    a, b, c = through([one, (one, one), other])
    assert b[0] is a
    assert b[1] is a
    assert c is not a


def test_another_class_is_named() -> None:
    with pytest.raises(TypeError, match="a bytes cannot be frozen; known: Pair, Box"):
        freeze([b""], CLASSES)
