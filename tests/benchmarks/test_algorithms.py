"""`megarl bench algorithms`: its numbers, its verdicts, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.benchmarks.algorithms import CASES, Case, judged
from tests.benchmarks.test_bench import bench


def made() -> tuple[object, None]:
    raise AssertionError("not called")


FOUND = {"case": "x", "cpu_s": 0.05, "extra_mb": 100.0, "quality": 1.01}


@pytest.mark.parametrize(
    ("case", "met", "words"),
    [
        (Case("x", made, seconds=0.05), True, "0.05 s"),
        (Case("x", made, seconds=0.04), False, "0.04 s"),
        (Case("x", made, seconds=1, megabytes=99), False, "1 s, 99 MB"),
        (Case("x", made, seconds=1, quality=("max/mean", 1.02)), True, "1 s, max/mean 1.02"),
        (Case("x", made, seconds=1, quality=("max/mean", 1.0)), False, "1 s, max/mean 1"),
    ],
)
def test_a_case_is_judged_by_all_its_targets(case: Case, met: bool, words: str) -> None:
    verdict = judged(case, FOUND)
    assert verdict["met"] is met
    assert verdict["target"] == words


def test_names_are_those_of_the_command_line() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.procs
def test_the_command_measures_and_saves(tmp_path: Path) -> None:
    done = bench(tmp_path, "algorithms", "--only", "partition", "--json", "out.json")
    assert done.code == 0, done.output
    assert "partition" in done.output
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert 0 < result["cpu_s"] < 5
    assert result["quality"] <= 1.02


@pytest.mark.procs
def test_an_unknown_name_is_the_users_to_fix(tmp_path: Path) -> None:
    done = bench(tmp_path, "algorithms", "--only", "gaee")
    assert done.code == 2
    assert "gae" in done.output
