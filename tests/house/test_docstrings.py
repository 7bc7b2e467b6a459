"""A docstring is a sentence: a function says in the imperative what it does, and none begins with "What".

tests/house/test_source.py looks for complaints about every file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.sources import definitions

FOLDERS = ("megarl/", "launchers/", "recipes/", "kernels/", "tools/")
#: Beginnings of a function's docstring that name a thing instead of an action.
NOUNS = ("A ", "An ", "The ", "Whether ", "How ", "Where ", "Which ")


def is_property(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any("property" in ast.unparse(decorator) for decorator in decorators)


def complaints(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and beginning of each docstring that is no sentence of its kind."""
    for node in definitions(tree):
        text = (ast.get_docstring(node, clean=False) or "").lstrip()
        does = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
        if text.startswith("What ") or (does and text.startswith(NOUNS)):
            yield node.body[0].lineno, text.partition("\n")[0]


def test_a_beginning_is_judged_by_the_kind_of_its_owner() -> None:
    code = '''
"""What a module is."""
class C:
    """The settings."""
    @property
    def size(self):
        """The number of bytes."""
    def read(self):
        """The content."""
    def write(self):
        """Write the content."""
'''
    assert [line for line, _ in complaints(ast.parse(code))] == [2, 9]
