"""Habits that make code hard to read: the count of each may only fall. `python tools/habits.py NAME` lists places.

tests/house/test_source.py counts them.
"""

from __future__ import annotations

import pytest

from tools.habits import HABITS, nodes_of

#: The places there are now. Whoever removes some lowers the number.
ALLOWANCES = {
    "local variables that name nothing": 29,
    "functions with more than 7 parameters": 45,
    "asserts that a value is not None": 122,
    "private functions under 5 lines with one caller": 86,
    "files outside megarl/robots that name robots": 6,
    "comparisons with the name of an engine": 2,  # of a protocol of reward servers
}

BAD = """
def read(a, b, c, d, e, f, g, h):
    found = a == "sglang"
    assert found is not None
    return _one(found)

def _one(value):
    return value + 1

TASK = "robot"
"""
GOOD = """
class Reader:
    def read(self, a, b, c, d, e, f, g):
        files = self._files(a)
        assert a and b
        return self._files(files)

    def _files(self, value):
        return value + 1
"""


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_counted(name: str) -> None:
    assert len(list(HABITS[name]({"bad.py": nodes_of(BAD)}))) == 1
    assert list(HABITS[name]({"good.py": nodes_of(GOOD)})) == []
