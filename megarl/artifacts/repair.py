"""Repair of a run folder before a start or resume: damaged files, except checkpoints, are set aside.

    a folder where a file belongs, and a file where a folder belongs
    run.json, best.json and mlflow.*.json with invalid content

Files of lines are repaired by their writers (`megarl.artifacts.jsonl`); checkpoints have checksums and their own
recovery. Only the holder of the folder's lock calls this.
"""

from __future__ import annotations

from pathlib import Path

from megarl.artifacts.records import RUN, Needs, parse_object, set_aside

_FOLDERS = ("checkpoints", "errors", "heartbeats", "launch", "logs", "servers", "sync", "trace", "videos")
_OF_FILES = (".", "checkpoints", "errors", "heartbeats", "logs", "trace")
_SUFFIXES = frozenset({".html", ".json", ".jsonl", ".svg", ".txt", ".yaml"})
_RECORDS: dict[str, Needs] = {
    RUN: {},
    "checkpoints/best.json": {"step": int},
    "mlflow.*.json": {"uri": str, "run_id": str, "status": str},
}


def repair(run_dir: Path) -> None:
    """Set aside damaged files, with a log line for each. Intact and unknown files stay as they are."""
    for name in _FOLDERS:
        if (run_dir / name).is_file():
            set_aside(run_dir / name, "a file where a folder belongs")
    for name in _OF_FILES:
        for path in (run_dir / name).glob("*"):
            named_as_file = path.suffix in _SUFFIXES or name == "heartbeats"
            if named_as_file and path.is_dir() and not path.is_symlink():
                set_aside(path, "a folder where a file belongs")
    for pattern, needs in _RECORDS.items():
        for path in run_dir.glob(pattern):
            try:
                parse_object(path.read_bytes(), needs)
            except ValueError as error:
                set_aside(path, str(error))
