"""What `.ci/run` does with the current Megatron-Core where it cannot be tried: it says so, and does not fail."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict:
    monkeypatch.syspath_prepend(str(TOOLS))
    names = runpy.run_path(str(TOOLS / "current_megatron.py"))["main"].__globals__
    names["CACHE"] = tmp_path
    monkeypatch.setattr(names["megatron_env"], "find_python", lambda: sys.executable)
    return names


def test_without_the_python_it_needs_nothing_is_tried(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool["megatron_env"], "find_python", lambda: None)
    assert tool["main"]() == 0
    assert "not tried, there is no Python 3.12 here" in capsys.readouterr().out


def test_without_room_nothing_is_tried(tool, capsys):
    tool["_ROOM"] = 1 << 60
    assert tool["main"]() == 0
    assert "GB of room, an environment takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("results", "code", "says"),
    [
        ([(2, "no network")], 0, "its environment could not be made: no network"),
        ([(None, "")], 0, "its environment is not complete after"),
        ([(0, ""), (0, "5 passed")], 0, "5 passed"),
        ([(0, ""), (1, "1 failed, 4 passed")], 1, "1 failed"),
        ([(0, ""), (None, "..")], 0, "had not ended after"),
    ],
)
def test_only_tests_that_fail_are_a_failure(tool, capsys, results, code, says):
    answers = iter(results)
    tool["run"] = lambda command, seconds: next(answers)
    assert tool["main"]() == code
    assert says in capsys.readouterr().out


def test_what_takes_too_long_ends_with_its_processes(tool):
    assert tool["run"]([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(99)"], 1)[0] is None
    assert tool["run"](["true"], 9) == (0, "")
