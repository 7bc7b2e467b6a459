"""What a run folder says of the time that nodes took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.artifacts.timings import read_timings
from megarl.system.errors import DataError


def write_run(folder: Path, rollout: list[float], teams: dict[str, Any] | None = None, workers: int = 4) -> Path:
    """The record of a run, as far as `read_timings` looks: seconds of its rollout, from step 0 on."""
    folder.mkdir(exist_ok=True)
    lines = [{"step": 1, "stage": "sft", "timing_s/rollout": 77.0}]
    lines += [{"step": step, "stage": "train", "timing_s/rollout": value} for step, value in enumerate(rollout)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"cluster": {"nproc": workers}, "placement": {"teams": teams or {}}}
    (folder / "run.json").write_text(json.dumps({"config": config}))
    return folder


def test_the_first_steps_validation_and_the_cold_start_do_not_count(tmp_path: Path) -> None:
    found = read_timings(write_run(tmp_path, [99, 50, 40, 1, 3, 2]))
    assert (found.first, found.last, found.seconds) == (3, 5, {"rollout": 2})
    assert (found.teams, found.workers) == ({}, 4)


def test_a_line_that_a_killed_run_left_half_written_does_not_count(tmp_path: Path) -> None:
    with (write_run(tmp_path, [0, 0, 0, 5, 5]) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "stage": "tr')
    assert read_timings(tmp_path).last == 4


def test_steps_without_a_phase_or_with_a_null_are_left_out_of_its_median(tmp_path: Path) -> None:
    write_run(tmp_path, [0, 0, 0, 5, 5])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step, fields in ((5, {"timing_s/value": 2}), (6, {"timing_s/value": None, "timing_s/rollout": 7})):
            file.write(json.dumps({"step": step, "stage": "train", **fields}) + "\n")
    assert read_timings(tmp_path).seconds == {"rollout": 5, "value": 2}


def test_teams_are_those_of_the_recipe(tmp_path: Path) -> None:
    write_run(tmp_path, [0] * 4, {"a": {"roles": ["actor", "rollout"], "devices": 3}})
    assert read_timings(tmp_path).teams == {"a": (("actor", "rollout"), 3)}


def test_what_is_no_record_of_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: this is not the record of a training run \(no such file"):
        read_timings(tmp_path / "missing")
    with pytest.raises(DataError, match=r"too few measured steps(?s:.*)found: +'2 RL steps'(?s:.*)at least 3"):
        read_timings(write_run(tmp_path, [0, 1, 2]))
    write_run(tmp_path, [0] * 4)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(DataError, match=r"run\.json: this is not the record of a training run \(keyerror: 'config'\)"):
        read_timings(tmp_path)
