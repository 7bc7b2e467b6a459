"""The guard: it watches the driver of a job from another node.

With --no-kill Slurm keeps the rest of a job when a node dies, also when that was the first one, where the job's
script runs: the job would hold its other nodes until its time limit.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from .files import ANSWER_S, LOOK_S, CommandFailed, answer

#: Seconds of silence of the driver after which its job is requeued: longer than a command of Slurm takes, the only
#: wait in which the driver writes nothing.
GUARD_S = 2 * ANSWER_S


def guard(run_dir: Path) -> int:
    """Requeue the job when its driver is silent."""
    file, job = run_dir / "launch" / "alive", os.environ["SLURM_JOB_ID"]
    seen, since = 0, time.monotonic()
    while True:
        with contextlib.suppress(OSError), file.open() as opened:  # which makes a network file system refresh it
            modified = os.fstat(opened.fileno()).st_mtime_ns  # a full disk accepts no text
            if modified != seen:
                seen, since = modified, time.monotonic()
        if time.monotonic() - since > GUARD_S:
            try:
                answer("scontrol", "requeue", job)
                return 0
            except CommandFailed as error:
                print(f"megarl: the first node is silent, and Slurm does not requeue the job: {error}", flush=True)
                since = time.monotonic()
        time.sleep(LOOK_S)
