"""Files of torch's profiler in a run folder, by step and worker (`trainer.profile`)."""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = "profile"
_NAME = re.compile(r"step_(\d+)_rank_(\d+)\.json\.gz")


def profile_file(run_dir: Path, step: int, worker: int) -> Path:
    """Return the path of the file for a step of a worker: a trace in Chrome's format, compressed by gzip."""
    return run_dir / _FOLDER / f"step_{step}_rank_{worker}.json.gz"


def profile_files(run_dir: Path) -> list[Path]:
    """Return the files in a run folder, relative to it, by step and worker."""
    named = [(_NAME.fullmatch(path.name), path) for path in (run_dir / _FOLDER).glob("step_*.json.gz")]
    numbers = {path: tuple(map(int, match.groups())) for match, path in named if match is not None}
    return [path.relative_to(run_dir) for path in sorted(numbers, key=numbers.__getitem__)]
