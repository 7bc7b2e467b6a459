"""Count habits that make code hard to read. tests/house/test_habits.py allows no more of each than there are now.

Run it as `python tools/habits.py [NAME]` for the counts, or for the places of one of them.
"""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("megarl", "launchers", "recipes", "kernels")
#: Local variables that do not name the thing that they hold.
VAGUE = {"found", "one", "own", "mine", "told", "said", "held", "kept", "what", "there", "taken", "asked"}
#: A function with more parameters than this hides a dataclass.
PARAMETERS = 7
#: A private function that is called once and has fewer lines than this should be part of its caller.
LINES = 5

#: Engines of `rollout.engine`; their differences belong in their family (megarl/rollout/family.py).
ENGINES = {"embedded", "sglang"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: The nodes of the syntax tree of each file, by its path in the repository.
Files = dict[str, list[ast.AST]]


def product() -> Files:
    """Return the nodes of the product's files."""
    names = subprocess.check_output(["git", "ls-files", *(f"{name}/*.py" for name in FOLDERS)], cwd=ROOT, text=True)
    files = [ROOT / name for name in names.splitlines() if (ROOT / name).is_file()]
    gc.disable()  # garbage collection of the syntax trees would take longer than parsing
    try:
        return {str(file.relative_to(ROOT)): nodes_of(file.read_text(encoding="utf-8")) for file in files}
    finally:
        gc.enable()


def nodes_of(source: str) -> list[ast.AST]:
    """Return the nodes of the syntax tree of a file with this content."""
    return walk(ast.parse(source))


def walk(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of a tree as `ast.walk` does, but without contexts and operators of one operand or two.

    It takes half as long.
    """
    nodes = [tree]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes.extend([part for part in value if isinstance(part, ast.AST)])
            elif isinstance(value, ast.AST) and value._fields:
                nodes.append(value)
    return nodes


def functions(nodes: list[ast.AST]) -> Iterator[Function]:
    """Yield every function and method of a file, nested ones too."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def vague_locals(files: Files) -> Iterator[str]:
    """Yield each assignment to a local variable with a vague name."""
    for place, nodes in files.items():
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
                yield f"{place}:{node.lineno} {node.id}"


def long_signatures(files: Files) -> Iterator[str]:
    """Yield the functions with too many parameters; `self`, `cls` and those by name only after `*` count, too."""
    for place, nodes in files.items():
        for function in functions(nodes):
            arguments = function.args
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            if len([name for name in names if name not in ("self", "cls")]) > PARAMETERS:
                yield f"{place}:{function.lineno} {function.name}"


def asserted_values(files: Files) -> Iterator[str]:
    """Yield the asserts that a value is not None: each is a type that is missing."""
    for place, nodes in files.items():
        for node in nodes:
            if isinstance(node, ast.Assert) and any(
                isinstance(part, ast.Compare)
                and any(isinstance(operator, ast.IsNot) for operator in part.ops)
                and any(isinstance(value, ast.Constant) and value.value is None for value in part.comparators)
                for part in ast.walk(node.test)
            ):
                yield f"{place}:{node.lineno}"


def body_lines(function: Function) -> int:
    """Return the lines of a function's body without its docstring."""
    body = function.body
    has_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    body = body[1:] if has_docstring else body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def small_helpers(files: Files) -> Iterator[str]:
    """Yield the private functions of a few lines whose file names them in one other place, where they are called."""
    for place, nodes in files.items():
        uses = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in nodes
            if isinstance(node, ast.Name | ast.Attribute)
        )
        called = {
            getattr(node.func, "id", getattr(node.func, "attr", "")) for node in nodes if isinstance(node, ast.Call)
        }
        for function in functions(nodes):
            private = function.name.startswith("_") and not function.name.startswith("__")
            once = uses[function.name] == 1 and function.name in called
            if private and once and not function.decorator_list and body_lines(function) < LINES:
                yield f"{place}:{function.lineno} {function.name}"


def robot_files(files: Files) -> Iterator[str]:
    """Yield the files outside megarl/robots and the recipes that name robots: in an identifier, import or text."""
    for place, nodes in files.items():
        if place.startswith(("megarl/robots/", "recipes/")):
            continue
        texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        values = (value for node in nodes if id(node) not in texts for value in vars(node).values())
        if any(isinstance(value, str) and "robot" in value.lower() for value in values):
            yield place


def engine_names(files: Files) -> Iterator[str]:
    """Yield the comparisons with the name of a generation engine outside the folder of an engine."""
    for place, nodes in files.items():
        for node in nodes:
            if not isinstance(node, ast.Compare) or place.startswith("megarl/rollout/"):
                continue
            if {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)} & ENGINES:
                yield f"{place}:{node.lineno}"


HABITS: dict[str, Callable[[Files], Iterator[str]]] = {
    "local variables that name nothing": vague_locals,
    f"functions with more than {PARAMETERS} parameters": long_signatures,
    "asserts that a value is not None": asserted_values,
    f"private functions under {LINES} lines with one caller": small_helpers,
    "files outside megarl/robots that name robots": robot_files,
    "comparisons with the name of an engine": engine_names,
}


def counts() -> dict[str, list[str]]:
    """Return the places of each habit."""
    files = product()
    return {name: list(habit(files)) for name, habit in HABITS.items()}


def main() -> int:
    """Print the counts, or the places of the habits whose name contains the argument."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else None
    for name, places in counts().items():
        if wanted is None:
            print(f"{name}: {len(places)}")
        elif wanted in name:
            print("\n".join(places))
    return 0


if __name__ == "__main__":
    sys.exit(main())
