"""Python files of the project, as trees."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def parse(file: Path) -> ast.Module:
    """Parse without looking for garbage among the nodes, which would take twice as long as parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    finally:
        if enabled:
            gc.enable()


def definitions(tree: ast.Module) -> Iterator[Definition]:
    """The module, and all classes and functions in it; it looks through statements only, not through expressions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition):
            yield node
        for block in ("finalbody", "orelse", "handlers", "cases", "body"):
            waiting.extend(reversed(getattr(node, block, ())))
