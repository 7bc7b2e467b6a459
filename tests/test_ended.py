"""How a process ended is said with one function, whatever it did for the run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megarl.system.processes import how_it_ended


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL, out of memory?"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 1)", "signal 35"),
    ],
)
def test_a_code_a_signal_and_one_without_a_name(code, said):
    assert how_it_ended(subprocess.Popen([sys.executable, "-Sc", code]), 60) == said


def test_one_that_is_still_there():
    process = subprocess.Popen([sys.executable, "-Sc", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert how_it_ended(process, 0) == "it closed its connection"
    process.communicate()
