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


def sections_of(page: str) -> dict[str, str]:
    """Texts of a page's sections, by their headings."""
    return dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", (ROOT / "docs" / page).read_text(), re.M | re.S))


SECTIONS = {**sections_of("tutorials.md"), "An agent": sections_of("agents.md")["A program"]}

#: Rows of each file of data in a try; whole runs have all of them.
ROWS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all tutorials share, as on the page."""
    return tmp_path_factory.mktemp("tutorials")


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float = 300.0) -> str:
    """Run one line of a page; its output, without the width of columns."""
    program, *arguments = shlex.split(command)
    if program == "python":
        monkeypatch.chdir(folder)
        runpy.run_path(arguments[0], run_name="__main__")
        return ""
    assert program == "megarl", command
    ended = forked.run(arguments, folder, limit_s, COLUMNS="200")
    assert ended.code == 0, ended.output[-4000:]
    return re.sub(" +", " ", ended.output)


def write_files(section: str, folder: Path) -> None:
    """Write the files that a section shows."""
    for _, text in FENCE.findall(SECTIONS[section]):
        if named := re.match(r"# (\w+\.\w+)\n", text):
            (folder / named[1]).write_text(text)


def shorten(folder: Path) -> None:
    """Leave the first rows of each file of data: to read thousands of them takes most of the time of a try."""
    for file in folder.glob("*.jsonl"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:ROWS]))


def commands(section: str) -> list[tuple[str, str]]:
    """The commands of a section, each with its comment."""
    lines = [line for language, text in FENCE.findall(SECTIONS[section]) if not language for line in text.splitlines()]
    return [(command.strip(), said) for command, _, said in (line.partition(" #") for line in lines)]


@pytest.mark.parametrize("section", SECTIONS)
def test_tutorial(section: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(iter(SECTIONS))
    if section != first and "my_run.yaml" in SECTIONS[section] and not (folder / "my_run.yaml").exists():
        pytest.skip(f"goes on from the files of {first!r}: select that test, too")
    write_files(section, folder)

    output = ""
    for line, said in commands(section):
        if "minutes" not in said:
            output += run(line, folder, monkeypatch)
            shorten(folder)

    for line in "".join(text for kind, text in FENCE.findall(SECTIONS[section]) if kind == "text").splitlines():
        assert re.search(re.escape(line).replace(re.escape("..."), ".*"), output), (line, output[-4000:])


@pytest.mark.campaign("tutorials")
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("section", [name for name in SECTIONS if "minutes" in SECTIONS[name]])
def test_whole_runs_of_a_tutorial(section: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end well, and in a validation that is at most 5 points below what the page says."""
    for name in list(SECTIONS)[: list(SECTIONS).index(section) + 1]:
        write_files(name, folder)
        for line, _ in commands(name):
            if line.startswith("python "):
                run(line, folder, monkeypatch)

    for line, said in commands(section):
        if "minutes" in said:
            output = run(line, folder, monkeypatch, 3600.0)
            if promised := re.findall(r"(\d+)%", said):
                reached = re.findall(r"validation: accuracy ([\d.]+)%", output)
                assert float(reached[-1]) >= float(promised[-1]) - 5, output[-4000:]
