"""Ctrl-C on a training run: the step under way is finished and saved before its workers end.

launcher: steps would be lost? -> RUN_DIR/save    workers: a step is over, `save` is there -> checkpoint, `save` goes
          `save` is gone, a worker has ended, none moves, or a second Ctrl-C -> all workers end
"""

from __future__ import annotations

import contextlib
import time

from megarl.artifacts.batch import SAVE
from megarl.artifacts.trained import steps_in
from megarl.errors import count
from megarl.launchers.common import Job, Stopped, Workers
from megarl.runtime.health import Watch, read_beat

_POLL_S = 0.1
#: Phases of the loop of each command that saves; others (loading, a cold start, the export) lead to no checkpoint.
_LOOPS = {"train": "step", "sft": "sft"}


def save_first(workers: Workers, job: Job) -> None:
    """Let a run write a checkpoint, where it would lose steps otherwise; returns when it has, or will not."""
    unsaved = _unsaved(job)
    if not unsaved:
        return
    cluster, ranks = job.config.cluster, workers.ranks()
    watch = Watch(job.run_dir, ranks, cluster.timeout_s, cluster.start_timeout_s, job.names)
    request = job.run_dir / SAVE
    request.touch()
    job.log.say(
        "megarl: interrupted; the step under way is finished and saved first. Ctrl-C again ends the run at once: what "
        f"it learnt in {count(unsaved, 'step')} is lost then"
    )
    try:
        with contextlib.suppress(Stopped):
            while request.exists() and not workers.poll() and watch.check(ranks) is None:
                time.sleep(_POLL_S)
    finally:
        request.unlink(missing_ok=True)


def _unsaved(job: Job) -> int:
    """Steps that are complete and in no checkpoint; 0 where the command saves none, or is not in its loop."""
    loop, beat = _LOOPS.get(job.entry.rpartition(":")[2]), read_beat(job.run_dir, 0)
    if loop is None or beat is None:
        return 0
    inside = beat.phase.partition("/")[0]
    if inside not in (loop, "checkpoint", "idle"):
        return 0
    complete = beat.step - (inside == loop)
    return max(0, complete - max(steps_in(job.run_dir / "checkpoints"), default=0))
