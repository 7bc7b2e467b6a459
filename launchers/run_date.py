"""The date that chat templates get: the day of the run's start, also when it resumes on another day."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.artifacts.records import read_run, setting

if TYPE_CHECKING:
    from megarl.config.run import RunConfig


def with_date(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return the recipe with `data.date` set: the date of the run in this folder or of the resumed run, else today."""
    if config.data.date is not None:
        return config
    resume, known = config.trainer.resume, None
    if resume == "auto":
        known = _date_of(run_dir)
    elif resume != "never":
        known = _date_of(Path(resume).absolute().parent.parent)
    date = known or datetime.date.today().isoformat()
    return config.model_copy(update={"data": config.data.model_copy(update={"date": date})})


def _date_of(run_dir: Path) -> str | None:
    """Return the date of the run in a folder; None without a run."""
    run = read_run(run_dir, tell=False)
    date = setting(run, "data", "date")
    if isinstance(date, str):
        return date
    started = run.get("started")  # a run of an earlier version records only its start
    return None if started is None else datetime.date.fromtimestamp(started).isoformat()
