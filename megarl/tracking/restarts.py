"""RUN_DIR/restarts.jsonl: when a launcher started the run, or a team of it, again by itself, and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import JsonlWriter, read_jsonl
from megarl.artifacts.records import Needs

NAME = "restarts.jsonl"
_NEEDS: Needs = {"restart": int, "time": (int, float), "why": str}


def note_restart(run_dir: Path, why: str, start: str) -> None:
    """Add a restart, at this moment.

    Args:
        run_dir: the run folder.
        why: who failed, how and where.
        start: what the run goes on from, in words.
    """
    number = len(read_restarts(run_dir)) + 1
    writer = JsonlWriter(run_dir / NAME)
    writer.write({"restart": number, "time": time.time(), "why": why, "start": start})
    writer.close()


def read_restarts(run_dir: Path) -> list[dict[str, Any]]:
    """All restarts of the run, oldest first."""
    return read_jsonl(run_dir / NAME, needs=_NEEDS)
