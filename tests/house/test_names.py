"""A name says one thing: no public class is defined in two modules."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.house.sources import parse
from tests.house.test_repository import ROOT, tracked

PRODUCT = tracked("megarl/*.py", "launchers/*.py", "recipes/*.py", "kernels/*.py")
#: As the line of a class looks; lines of texts that a module holds look so, too.
CLASS = re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE)


def test_every_public_class_has_a_name_of_its_own() -> None:
    found = defaultdict(list)
    for path in PRODUCT:
        for name in CLASS.findall(path.read_text(encoding="utf-8")):
            found[name].append(path)

    assert len(found) > 100, "the product's files were not found"
    several = {name: definitions(name, paths) for name, paths in found.items() if len(paths) > 1}
    assert {name: places for name, places in several.items() if len(places) > 1} == {}


def definitions(name: str, paths: list[Path]) -> list[str]:
    """The places at which one of these modules defines a class of this name."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in dict.fromkeys(paths)
        for node in parse(path).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
