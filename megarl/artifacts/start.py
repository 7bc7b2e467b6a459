"""What a start makes in its run folder before it is accepted: weights that pass from the actor to other models.

    actor's team -> reference.next, start.next -> other teams make their models -> accepted: reference/
                                                                               -> refused:  removed

A worker that is waiting when another one refuses the start is ended, so whoever ended it removes them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

REFERENCE = "reference.next"  # the reference of a start that may still be refused
PASSING = "start.next"  # what RL starts from, until all teams have their models


def drop(run_dir: Path) -> None:
    """Remove them. One process calls this, when no other one reads or makes them any more."""
    for name in (REFERENCE, PASSING):
        shutil.rmtree(run_dir / name, ignore_errors=True)
