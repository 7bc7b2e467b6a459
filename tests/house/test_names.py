"""A name says one thing: no public class is defined in two modules."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.house.sources import parse
from tests.house.test_repository import ROOT, tracked

PRODUCT = tracked("megarl/*.py", "launchers/*.py", "recipes/*.py", "kernels/*.py")


def test_every_public_class_has_a_name_of_its_own() -> None:
    found = defaultdict(list)
    for path in PRODUCT:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert len(found) > 100, "the product's files were not found"
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
