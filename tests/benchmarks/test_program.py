"""Programs that are measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.benchmarks.program import run_program
from megarl.errors import WorkerError


def test_output_and_share() -> None:
    output, share = run_program([sys.executable, "-c", "print(7)"])

    assert output == "7\n"
    assert 0 <= share <= 1


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(WorkerError, match=r"exit code 3:\nno luck"):
        run_program([sys.executable, "-c", "import sys; print('no luck', file=sys.stderr); sys.exit(3)"])


@pytest.mark.procs
@pytest.mark.parametrize("levels", [1, 2])  # a round of --compare is a benchmark of its own
def test_a_program_ends_with_the_benchmark(tmp_path: Path, levels: int) -> None:
    mark = tmp_path / "pid"
    outer = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    for _ in range(levels):
        outer = (
            "import sys; from megarl.benchmarks.program import run_program; "
            f"run_program([sys.executable, '-c', {outer!r}])"
        )
    with subprocess.Popen([sys.executable, "-c", outer]) as bench:
        deadline = time.monotonic() + 60
        while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        bench.send_signal(signal.SIGTERM)

    assert bench.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
