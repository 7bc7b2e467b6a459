"""Prompts with a date stay those of the run's start."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from megarl.config.load import dump_config, load_config
from megarl.launchers.common import with_date

STARTED = datetime.datetime(2024, 2, 29, 12).timestamp()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    "record", [{"started": STARTED, "config": {"data": {"date": "2024-02-29"}}}, {"started": STARTED}]
)
@pytest.mark.parametrize(
    ("overrides", "date"),
    [
        ([], "2024-02-29"),
        (["trainer.resume={run}/checkpoints/step_3"], "2024-02-29"),
        (["data.date=2023-01-01"], "2023-01-01"),
        (["trainer.resume=never"], datetime.date.today().isoformat()),
    ],
)
def test_a_run_that_resumes_keeps_its_date(run_dir: Path, record: dict, overrides: list[str], date: str) -> None:
    (run_dir / "run.json").write_text(json.dumps(record))
    given = [text.format(run=run_dir) for text in overrides]
    config = with_date(load_config("grpo_quickstart", given), run_dir)
    assert config.data.date == date
    (run_dir / "recipe.yaml").write_text(dump_config(config))
    assert load_config(run_dir / "recipe.yaml").data.date == date


def test_a_new_run_has_the_date_of_today(run_dir: Path) -> None:
    assert with_date(load_config("grpo_quickstart"), run_dir).data.date == datetime.date.today().isoformat()
