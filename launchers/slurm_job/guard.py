"""The guard, which watches the driver of a job from another node.

With --no-kill Slurm keeps a job when a node dies, even the first node, which runs the job's script: the job would then
hold its other nodes until its time limit.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from .files import ANSWER_S, LOOK_S, CommandFailed, answer

#: Seconds without a heartbeat after which the job is requeued: longer than a command of Slurm may take
#: (ANSWER_S), during which the driver writes none.
GUARD_S = 2 * ANSWER_S


def guard(run_dir: Path) -> int:
    """Requeue the job when its driver sends no heartbeats."""
    file, job = run_dir / "launch" / "alive", os.environ["SLURM_JOB_ID"]
    seen, since = 0, time.monotonic()
    while True:
        # opening makes a network file system refresh the file's time
        with contextlib.suppress(OSError), file.open() as opened:
            # not the content: on a full disk the driver can only set the file's time
            modified = os.fstat(opened.fileno()).st_mtime_ns
            if modified != seen:
                seen, since = modified, time.monotonic()
        if time.monotonic() - since > GUARD_S:
            try:
                answer("scontrol", "requeue", job)
                return 0
            except CommandFailed as error:
                text = "the first node sends no heartbeats, and Slurm does not requeue the job"
                print(f"megarl: {text}: {error}", flush=True)
                since = time.monotonic()
        time.sleep(LOOK_S)
