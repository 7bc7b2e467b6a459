"""Who used the machine."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from megarl.benchmarks import quiet


def test_the_share_is_what_was_busy_and_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_busy", itertools.count(100.0, 7.0).__next__)
    monkeypatch.setattr(quiet, "_own", itertools.count(20.0, 3.0).__next__)
    monkeypatch.setattr(quiet.time, "perf_counter", itertools.count(0.0, 10.0).__next__)
    monkeypatch.setattr(quiet.os, "cpu_count", lambda: 2)

    with quiet.OthersShare() as others:
        pass

    assert others.share == pytest.approx((7 - 3) / (10 * 2))


def test_what_a_child_used_is_ours() -> None:
    before = quiet._own()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)

    assert 0.5 <= quiet._own() - before < 5
