"""A cold start that is interrupted goes on from its checkpoint, and the run is the undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.artifacts.run_folder import COLD_START, LAUNCH_FOLDER, SAVE_REQUEST
from megarl.artifacts.trained import steps_in
from megarl.runtime.cold_start import ColdStartCheckpoints
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]


class Interrupted(Exception):
    """The end of a run that has saved."""


def interrupted_work(*arguments: object) -> None:
    """The run, as one of its ranks, which is asked for a checkpoint in step 2 of the cold start and ended after it."""
    run_dir, save = Path(str(arguments[1])), ColdStartCheckpoints.after_step

    def after_step(self: ColdStartCheckpoints, step: int, *rest: object, **more: object) -> None:
        if step == 2:
            (run_dir / LAUNCH_FOLDER).mkdir(exist_ok=True)
            (run_dir / LAUNCH_FOLDER / SAVE_REQUEST).touch()
        save(self, step, *rest, **more)
        if step == 2:
            raise Interrupted

    ColdStartCheckpoints.after_step = after_step
    harness.work_of_rank(*arguments)


def lines(run_dir: Path) -> list[dict[str, float]]:
    """Everything but times and memory of both stages."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/")) and k != "time"} for row in rows]


def test_a_cold_start_that_is_interrupted_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    recipe = harness.write_recipe(tmp_path)
    short = ("trainer.steps=1", "sft.eval_every=2", "trainer.export_hf=false")
    harness.train(recipe, tmp_path / "whole", *short)
    with pytest.raises(Exception, match="Interrupted"):
        harness.train(recipe, tmp_path / "cut", *short, work=interrupted_work)
    assert steps_in(tmp_path / "cut" / COLD_START) == [2]
    assert not (tmp_path / "cut" / LAUNCH_FOLDER / SAVE_REQUEST).exists()
    harness.train(recipe, tmp_path / "cut", *short)
    assert not (tmp_path / "cut" / COLD_START).exists()
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert [(row["stage"], row["step"]) for row in lines(tmp_path / "cut")][:3] == [("sft", 1), ("sft", 2), ("sft", 3)]
