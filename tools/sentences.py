"""Draw sentences of the code for a reader who has not seen it: `python tools/sentences.py --seed 1 --out FOLDER`

    questions.md    150 docstrings, 100 comments and 100 error messages, numbered, each with its file and what stands
                    beside it: the function's class, name and parameters, the line under a comment, the kind of an error
    places.md       the file and line of each number

The reader writes for each number in one sentence what the function does, why the comment is there, or what the user
should do. Somebody else compares the answers with the code. The same seed draws the same sentences of the same tree.
"""

from __future__ import annotations

import argparse
import ast
import copy
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("megarl", "launchers", "recipes", "kernels")
COUNTS = {"docstring": 150, "comment": 100, "error message": 100}
#: Comments for tools, and headings of sections, are no sentences.
DIRECTIVES = ("type:", "noqa", "pragma", "fmt:", "ruff:", "mypy:", "isort:", "!", "--")


@dataclass(frozen=True)
class Sentence:
    """A docstring, comment or error message, with what a reader sees beside it."""

    kind: str
    place: str
    beside: str
    text: str


def docstrings(tree: ast.Module, place: str) -> Iterator[Sentence]:
    """Yield the docstrings of functions and classes, with the signature."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    owners = {method: owner.name + "." for owner in classes for method in owner.body}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text:
            signature = (
                f"class {node.name}"
                if isinstance(node, ast.ClassDef)
                else f"def {owners.get(node, '')}{node.name}"
                f"({', '.join(argument.arg for argument in node.args.args + node.args.kwonlyargs)})"
            )
            yield Sentence("docstring", f"{place}:{node.lineno}", signature, text)


def module_of(file: str) -> str:
    """Return the name under which a file of the repository is imported."""
    parts = Path(file).with_suffix("").parts
    return ".".join(parts if parts[0] == "megarl" else ("megarl", *parts)).removesuffix(".__init__")


def string_constants(tree: ast.Module) -> dict[str, str]:
    """Map the names of a module's constants (capital letters) that are strings to their values."""
    constants: dict[str, str] = {}
    for node in tree.body:
        targets, value = [], None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            targets, value = [node.targets[0]], node.value
        elif isinstance(node, ast.AnnAssign):
            targets, value = [node.target], node.value
        values = [value]
        if targets and isinstance(targets[0], ast.Tuple) and isinstance(value, ast.Tuple):
            targets, values = targets[0].elts, list(value.elts)
        for target, item in zip(targets, values, strict=False):
            if isinstance(target, ast.Name) and target.id.isupper() and item is not None:
                text = message(Expanded(constants).visit(copy.deepcopy(item)))
                constants |= {target.id: text} if text else {}
    return constants


def known_constants(file: str, tree: ast.Module, modules: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Map names to the string constants that a file defines or imports, as `modules` has them by module."""
    module = module_of(file)
    package = module if Path(file).name == "__init__.py" else module.rpartition(".")[0]
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            constants = modules.get(".".join([*above, *([node.module] if node.module else [])]), {})
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            known |= {name: constants[origin] for name, origin in names.items() if origin in constants}
    return known | dict(modules[module])


class Expanded(ast.NodeTransformer):
    """Replaces names of string constants by their values, as they are when an error is raised."""

    def __init__(self, constants: Mapping[str, str]) -> None:
        self._constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the value of a constant's name; any other name stays."""
        value = self._constants.get(node.id)
        return node if value is None else ast.copy_location(ast.Constant(value), node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        """Return the text of a braced constant; any other braced value stays, with the constants in it replaced."""
        self.generic_visit(node)
        bare = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) and node.format_spec is None
        return node.value if bare and node.conversion == -1 else node


def message(node: ast.expr) -> str:
    """Return a string expression as a reader sees it, with names in braces for values; empty for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{" + ast.unparse(part.value) + "}" if isinstance(part, ast.FormattedValue) else message(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message(node.left) + message(node.right)
    return ""


def own_words(node: ast.expr) -> list[str]:
    """Return the words of a string expression that are written in it, not in the values that it names."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"[A-Za-z]{2,}", node.value)
    if isinstance(node, ast.JoinedStr):
        return [word for part in node.values for word in own_words(part)]
    if isinstance(node, ast.FormattedValue):
        return own_words(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return own_words(node.left) + own_words(node.right)
    if isinstance(node, ast.IfExp):
        return own_words(node.body) + own_words(node.orelse)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return own_words(node.func.value)
    return []


def error_messages(tree: ast.Module, place: str, constants: Mapping[str, str]) -> Iterator[Sentence]:
    """Yield the messages of `raise` statements that are written where the error is raised, with their place and fix.

    Args:
        constants: the string constants that the file knows; messages have their values.
    """
    for node in ast.walk(Expanded(constants).visit(tree)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = ast.unparse(node.exc.func)
            texts = node.exc.args
            if len(texts) > 1 and isinstance(texts[0], ast.Constant) and re.fullmatch(r"\w+", str(texts[0].value)):
                texts = texts[1:]  # the first argument is an error code for programs
            parts = {"": texts[0]} | {f"{word.arg}: ": word.value for word in node.exc.keywords if word.arg}
            text = "\n".join(name + (message(value) or "{" + ast.unparse(value) + "}") for name, value in parts.items())
            words = sum(len(own_words(value)) for name, value in parts.items() if name not in ("where: ", "found: "))
            if words >= 3:  # with fewer words the text is written elsewhere
                yield Sentence("error message", f"{place}:{node.lineno}", kind, text)


def comments(source: str, place: str) -> Iterator[Sentence]:
    """Yield the comments, with the line of code that each stands over or in."""
    lines = source.splitlines()
    block: list[str] = []
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if stripped.startswith("#"):
            block.append(stripped.lstrip("#: ").rstrip())
            continue
        text = " ".join(block)
        if text and not text.startswith(DIRECTIVES):
            yield Sentence("comment", f"{place}:{number}", stripped, text)
        block = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#: ")
        if token.type == tokenize.COMMENT and token.line.strip() != token.string and not text.startswith(DIRECTIVES):
            code = token.line[: token.start[1]].strip()
            yield Sentence("comment", f"{place}:{token.start[0]}", code, text)


def sentences() -> list[Sentence]:
    """Return all sentences of the product, in the order of its files."""
    names = subprocess.check_output(["git", "ls-files", *(f"{name}/*.py" for name in FOLDERS)], cwd=ROOT, text=True)
    sources = {name: (ROOT / name).read_text(encoding="utf-8") for name in names.splitlines()}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    modules = {module_of(name): string_constants(tree) for name, tree in trees.items()}
    every: list[Sentence] = []
    for name, tree in trees.items():
        constants = known_constants(name, tree, modules)
        every += [*docstrings(tree, name), *comments(sources[name], name), *error_messages(tree, name, constants)]
    return every


def main() -> int:
    """Draw, and write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    every, chance = sentences(), random.Random(arguments.seed)
    questions, places = [], []
    number = 0
    for kind, count in COUNTS.items():
        population = [sentence for sentence in every if sentence.kind == kind]
        questions.append(f"# {count} of {len(population)}: {kind}\n")
        for sentence in chance.sample(population, count):
            number += 1
            file = sentence.place.rpartition(":")[0]
            questions.append(
                f"**{number}.** {file}: `{sentence.beside}`\n\n> " + sentence.text.replace("\n", "\n> ") + "\n"
            )
            places.append(f"{number}. {sentence.place}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "questions.md").write_text("\n".join(questions), encoding="utf-8")
    (arguments.out / "places.md").write_text("\n".join(places) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
