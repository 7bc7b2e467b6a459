"""Programs that are measured."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.benchmarks import program
from megarl.benchmarks.program import run_program
from megarl.system.errors import WorkerError


def test_output_and_share() -> None:
    output, share = run_program([sys.executable, "-c", "print(7)"])

    assert output == "7\n"
    assert 0 <= share <= 1


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(WorkerError, match=r"exit code 3:\nno luck"):
        run_program([sys.executable, "-c", "import sys; print('no luck', file=sys.stderr); sys.exit(3)"])


def test_errors_are_part_of_the_output_where_they_are_asked_for() -> None:
    code = "import sys; print('out', flush=True); print('log', file=sys.stderr)"

    assert run_program([sys.executable, "-c", code], merged=True)[0] == "out\nlog\n"


def test_a_program_that_hangs_is_stopped_at_its_limit() -> None:
    code = "import sys, time; print('waiting for a peer', file=sys.stderr, flush=True); time.sleep(60)"

    with pytest.raises(WorkerError, match=r"did not end within 3 s, and was stopped; its last output:\nwaiting"):
        run_program([sys.executable, "-ISc", code], limit_s=3)


@pytest.mark.procs
@pytest.mark.parametrize("levels", [1, 2])  # a round of --compare is a benchmark of its own
@pytest.mark.parametrize("ignores", [False, True])  # SIGTERM, and writes more than a pipe holds
def test_a_program_ends_with_the_benchmark(tmp_path: Path, levels: int, ignores: bool) -> None:
    mark = tmp_path / "pid"
    outer = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(120)"
    if ignores:
        outer = f"import signal; signal.signal(15, lambda *_: print('x' * 200_000)); {outer}"
    for _ in range(levels):
        outer = (
            "import sys; from megarl.benchmarks.program import run_program; "
            f"run_program([sys.executable, '-c', {outer!r}])"
        )
    grace = {"MEGARL_BENCH_GRACE_S": "2" if levels == 1 else "20"}  # 5 s at the second level: room for its own end
    with subprocess.Popen([sys.executable, "-c", outer], env=os.environ | grace) as bench:
        deadline = time.monotonic() + 200
        while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        bench.send_signal(signal.SIGTERM)

    assert bench.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_the_share_is_what_was_busy_and_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_busy", itertools.count(100.0, 7.0).__next__)
    monkeypatch.setattr(program, "_own", itertools.count(20.0, 3.0).__next__)
    monkeypatch.setattr(program.time, "perf_counter", itertools.count(0.0, 10.0).__next__)
    monkeypatch.setattr(program.os, "cpu_count", lambda: 2)

    with program.OthersShare() as others:
        pass

    assert others.share == pytest.approx((7 - 3) / (10 * 2))


def test_what_a_child_used_is_ours() -> None:
    before = program._own()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)

    assert 0.5 <= program._own() - before < 5
