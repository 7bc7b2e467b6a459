"""The tutorials run as they are written: their files, and their commands one after the other in one folder."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from tests import forked
from tests.house.test_docs import FENCE, ROOT

pytestmark = [pytest.mark.procs, pytest.mark.timeout(900)]
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/tutorials.md").read_text(), re.M | re.S))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all tutorials share, as on the page."""
    return tmp_path_factory.mktemp("tutorials")


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run one line of a page; its output, without the width of columns."""
    program, *arguments = shlex.split(command)
    if program == "python":
        monkeypatch.chdir(folder)
        runpy.run_path(arguments[0], run_name="__main__")
        return ""
    assert program == "megarl", command
    ended = forked.run(arguments, folder, 300.0, COLUMNS="200")
    assert ended.code == 0, ended.output[-4000:]
    return re.sub(" +", " ", ended.output)


def follow(section: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, long: bool = False) -> None:
    """Write the files of a section, run its commands, and look for the lines that it shows in their output.

    Args:
        section: the heading.
        folder: where the files of earlier sections are.
        monkeypatch: for the working folder.
        long: run the commands that take minutes, and not the others.
    """
    output = ""
    for language, text in FENCE.findall(SECTIONS[section]):
        named = re.match(r"# (\w+\.\w+)\n", text)
        if named:
            (folder / named[1]).write_text(text)
        elif language == "text":
            for line in () if long else text.splitlines():
                assert re.search(re.escape(line).replace(re.escape("..."), ".*"), output), (line, output[-4000:])
        else:
            lines = [line.partition(" #") for line in text.splitlines()]
            chosen = [line for line, _, said in lines if ("minutes" in said) == long]
            output = "".join(run(line.strip(), folder, monkeypatch) for line in chosen)


@pytest.mark.parametrize("section", SECTIONS)
def test_tutorial(section: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(iter(SECTIONS))
    if section != first and "my_run.yaml" in SECTIONS[section] and not (folder / "my_run.yaml").exists():
        pytest.skip(f"goes on from the files of {first!r}: select that test, too")
    follow(section, folder, monkeypatch)


@pytest.mark.campaign("tutorials")
@pytest.mark.parametrize("section", [name for name in SECTIONS if "minutes" in SECTIONS[name]])
def test_whole_runs_of_a_tutorial(section: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECTIONS:  # files of the sections before
        follow(name, folder, monkeypatch, long=name == section)
        if name == section:
            return
