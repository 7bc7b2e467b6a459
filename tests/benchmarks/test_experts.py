"""What `python -m megarl.benchmarks.experts` prints."""

from __future__ import annotations

import pytest

from megarl.benchmarks.experts import main

pytestmark = pytest.mark.procs


def test_it_says_what_noise_and_bins_take(capsys) -> None:
    given = ["--tasks", "reach_red", "--episodes", "2", "--noise", "0", "0.1", "--bins", "3", "4096", "--workers", "1"]
    assert main(given) == 0
    first, second, coarse, fine = capsys.readouterr().out.splitlines()
    assert first.startswith("noise 0:")
    assert first.endswith(" environment steps")
    assert "experts solved 2 of 2 episodes" in first
    assert "noise 0.1:" in second
    assert coarse.startswith("3 bins: reach_red ")
    assert fine == "4096 bins: reach_red 2 of 2"
