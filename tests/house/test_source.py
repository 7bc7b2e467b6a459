"""Rules for every Python file. Each file is parsed once for all of them, because parsing the product takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

from tests.house import test_docstrings as docstrings
from tests.house import test_groups as groups
from tests.house import test_layers as layers
from tests.house import test_plain as plain
from tests.house.sources import definitions, parse
from tests.house.test_habits import ALLOWANCES
from tests.house.test_repository import ROOT, tracked
from tools import habits

LINES = 60
FOLDERS = ("megarl/", "launchers/", "recipes/", "kernels/", "benchmarks/", "tests/", "tools/")


class Source(NamedTuple):
    """A file: its text, its tree, and all nodes of it where a rule goes through them."""

    text: str
    tree: ast.Module
    nodes: list[ast.AST]


def long_functions(source: Source) -> list[str]:
    return [
        f"{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in definitions(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= LINES
    ]


class Rule(NamedTuple):
    """Where a rule holds, and its findings in a file."""

    folders: tuple[str, ...]
    look: Callable[[Source], Iterable]
    walks: bool = True


RULES = {
    "long functions": Rule(FOLDERS, long_functions, walks=False),
    "docstrings": Rule(docstrings.FOLDERS, lambda source: docstrings.complaints(source.tree), walks=False),
    "default groups": Rule(
        groups.FOLDERS, lambda source: groups.findings(source.nodes) if groups.ANY.search(source.text) else ()
    ),
    "pickles": Rule(
        plain.FOLDERS, lambda source: plain.findings(source.nodes) if plain.ANY.search(source.text) else ()
    ),
    "imports by text": Rule(
        layers.FOLDERS, lambda source: layers.names_of(source.nodes) if layers.ANY.search(source.text) else ()
    ),
}


@pytest.fixture(scope="module")
def review() -> dict[str, dict[str, list]]:
    """Rule or habit -> file -> its findings, where there are some."""
    review: dict[str, dict[str, list]] = {name: {} for name in (*RULES, *habits.HABITS)}
    paths = tracked(*(f"{folder}*.py" for folder in FOLDERS))
    assert len(paths) > 1000, "the files were not found"
    for path in paths:
        file, tree = str(path.relative_to(ROOT)), parse(path)
        rules = {name: rule for name, rule in RULES.items() if file.startswith(rule.folders)}
        nodes = habits.walk(tree) if any(rule.walks for rule in rules.values()) else []
        source = Source(path.read_text(encoding="utf-8"), tree, nodes)
        found = {name: list(rule.look(source)) for name, rule in rules.items()}
        if file.startswith(tuple(f"{folder}/" for folder in habits.FOLDERS)):
            found |= {name: list(habit({file: nodes})) for name, habit in habits.HABITS.items()}
        for name, findings in found.items():
            if findings:
                review[name][file] = findings
    return review


def test_functions_fit_on_a_screen(review: dict[str, dict[str, list]]) -> None:
    assert review["long functions"] == {}


def test_a_long_function_is_found() -> None:
    code = "class C:\n  def f():\n" + "    x\n" * 60 + "  def g():\n" + "    x\n" * 59
    assert long_functions(Source(code, ast.parse(code), [])) == ["2: f has 61 lines"]


def test_docstrings_are_sentences(review: dict[str, dict[str, list]]) -> None:
    assert review["docstrings"] == {}


def test_every_call_that_talks_to_other_ranks_is_given_its_group(review: dict[str, dict[str, list]]) -> None:
    found = {file: {what for what, _ in findings} for file, findings in review["default groups"].items()}
    allowed = {file: calls for file, (calls, _) in groups.ALLOWED.items()}
    wrong = {file: calls for file, calls in found.items() if calls - allowed.get(file, set())}
    assert wrong == {}, "give it a WorkerGroup (megarl/system/comm.py), and call its method or pass group="
    assert [file for file, calls in allowed.items() if not calls & found.get(file, set())] == [], "not used any more"


def test_nothing_unpickles_but_what_is_on_the_list(review: dict[str, dict[str, list]]) -> None:
    found = review["pickles"]
    assert {file: hits for file, hits in found.items() if file not in plain.ALLOWED} == {}
    assert sorted(set(plain.ALLOWED) - set(found)) == [], "these need no exception any more"
    assert [file for file in plain.ALLOWED if file.startswith(plain.FOREIGN)] == []


@pytest.mark.parametrize(("place", "listed"), [(0, layers.BY_NAME), (1, layers.NAMES)], ids=["calls", "texts"])
def test_only_listed_files_import_what_a_text_names_or_hold_names_of_modules(
    place: int, listed: dict[str, str], review: dict[str, dict[str, list]]
) -> None:
    found = {file: names[place] for file, names in review["imports by text"].items() if names[place]}
    assert {file: names for file, names in found.items() if file not in listed} == {}
    assert [file for file in listed if file not in found] == []


def test_no_habit_spreads(review: dict[str, dict[str, list]]) -> None:
    places = {name: [place for found in review[name].values() for place in found] for name in habits.HABITS}
    assert set(places) == set(ALLOWANCES)
    assert [name for name, allowed in ALLOWANCES.items() if allowed and not places[name]] == [], "lower these to 0"
    spread = {name: places[name] for name, allowed in ALLOWANCES.items() if len(places[name]) > allowed}
    assert spread == {}, "more places than allowed: write the new ones without the habit"
