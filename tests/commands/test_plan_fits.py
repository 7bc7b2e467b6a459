"""What docs, recipes and benchmark cases name for GPUs fits their memory by `megarl plan`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megarl import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[list[str]]:
    """The arguments of every `megarl plan` in the pages, and of one for each recipe and case for GPUs.

    Recipes of robot policies are left out: what they name is a folder with a policy, which has to be there.
    """
    files = [file for folder in ("recipes", "benchmarks/cases") for file in sorted((ROOT / folder).glob("*.yaml"))]
    found = [[str(file.relative_to(ROOT))] for file in files if re.search(r"^[^s].*(\dgpu|_h100x)", file.name)]
    for page in PAGES:
        for line in re.findall(r"^megarl plan (.*?)(?: *#.*)?$", page.read_text(), re.MULTILINE):
            arguments = shlex.split(line)
            if arguments[0] != "RECIPE":
                found.append(arguments)
    return found


def test_there_are_some() -> None:
    assert len(commands()) > 12


@pytest.mark.parametrize("arguments", commands(), ids=lambda arguments: Path(arguments[0]).stem)
def test_it_fits(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    code = cli.main(["plan", *arguments, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["does_not_fit"] == []
    assert told["may_not_fit"] == []
