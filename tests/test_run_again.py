"""The second run of tests that failed."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools/run_again.py"
SUITE = """
import pathlib

def test_which_fails_once():
    seen = pathlib.Path("seen")
    before = seen.exists()
    seen.touch()
    assert before

def test_which_passes():
    pass

def test_which_fails():
    assert BROKEN == 0
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def _twice(folder: Path, suite: str) -> tuple[int, int, str]:
    (folder / "test_some.py").write_text(suite)
    first = subprocess.run([sys.executable, "-m", "pytest"], cwd=folder, capture_output=True)
    again = subprocess.run([sys.executable, TOOL], cwd=folder, capture_output=True, text=True)
    return first.returncode, again.returncode, again.stdout


def test_a_test_that_passes_by_itself_is_named_and_one_that_fails_again_is_broken(tmp_path):
    first, again, output = _twice(tmp_path, SUITE.replace("BROKEN", "0"))
    assert (first, again) == (1, 0)
    assert "UNSTABLE" in output
    assert "test_which_fails_once" in output
    assert "1 passed" in output.splitlines()[-1]
    first, again, output = _twice(tmp_path, SUITE.replace("BROKEN", "1"))
    assert (first, again) == (1, 1)
    assert "1 failed" in output.splitlines()[-1]


def test_many_failures_are_not_run_again(tmp_path):
    suite = "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test(n): assert n < 0\n"
    first, again, output = _twice(tmp_path, suite)
    assert (first, again, output) == (1, 1, "4 tests failed: not run again\n")
