"""Files of a start that is not accepted yet in its run folder: weights that pass from the actor to other models.

    actor's team -> reference.next, start.next -> other teams make their models -> accepted: reference/
                                                                               -> refused:  removed

A worker that waits when another one refuses the start is killed, so the process that killed it removes them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

REFERENCE = "reference.next"  # the reference of a start that may still be refused
PASSING = "start.next"  # the weights that RL starts from, until all teams have their models


def drop(run_dir: Path) -> None:
    """Remove these files. One process calls this, when no other one reads or writes them any more."""
    for name in (REFERENCE, PASSING):
        shutil.rmtree(run_dir / name, ignore_errors=True)
