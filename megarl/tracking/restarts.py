"""RUN_DIR/restarts.jsonl: automatic restarts of a run or team by a launcher, with their reasons."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import JsonlWriter, read_jsonl
from megarl.artifacts.records import Needs

NAME = "restarts.jsonl"
_NEEDS: Needs = {"restart": int, "time": (int, float), "why": str}


def note_restart(run_dir: Path, why: str, start: str) -> None:
    """Record a restart that happens now, with the failed worker's error and its place, and the checkpoint `start`."""
    number = len(read_restarts(run_dir)) + 1
    writer = JsonlWriter(run_dir / NAME)
    writer.write({"restart": number, "time": time.time(), "why": why, "start": start})
    writer.close()


def read_restarts(run_dir: Path) -> list[dict[str, Any]]:
    """Return all restarts of the run, oldest first."""
    return read_jsonl(run_dir / NAME, needs=_NEEDS)
