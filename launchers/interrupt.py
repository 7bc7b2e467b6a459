"""Handles a signal that stops a training run: the current step is finished and saved before the workers end.

launcher: steps would be lost? -> RUN_DIR/save    workers: a step is over, `save` exists -> checkpoint, `save` removed
`save` is gone, a worker has ended, none moves, or a second signal  -> all workers end
SIGTERM, SIGHUP: also after cluster.grace_s, as their sender kills soon after
"""

from __future__ import annotations

import math
import signal
import time

from megarl.artifacts.run_folder import COLD_START, SAVE_REQUEST
from megarl.artifacts.trained import steps_in
from megarl.launchers.common import Job, Workers
from megarl.runtime.health import Watch, read_beat
from megarl.system.errors import WorkerError, count

_POLL_S = 0.1
#: Phases in which each command that saves takes a step. Outside of these phases and of `_BETWEEN_STEPS` (loading, the
#: export) no checkpoint is requested.
_LOOPS = {"train": ("step", "sft"), "sft": ("sft",)}
_BETWEEN_STEPS = ("checkpoint", "idle", "await_metrics", "reduce_metrics")
#: Signals after which the sender, such as Slurm or systemd, waits only for a limited time before SIGKILL.
_LIMITED = (signal.SIGTERM, signal.SIGHUP)


def save_first(workers: Workers, job: Job, number: int) -> None:
    """Let a run write a checkpoint if it would lose steps otherwise; return when it is written or cannot be. Raise
    Stopped if a second signal was received.
    """
    newest = _newest(job)
    unsaved = _unsaved(job, newest)
    if not unsaved:
        return
    saved = f"the checkpoint of step {newest}" if newest else "the beginning"
    name, grace_s = signal.Signals(number).name, job.config.cluster.grace_s
    limited = number in _LIMITED
    limit = f", within {grace_s:g} s (cluster.grace_s)" if limited else ""
    lost = f"{count(unsaved, 'step')} of training will be lost"
    again = "Ctrl-C again" if number == signal.SIGINT else "A second signal"
    request = job.run_dir / SAVE_REQUEST
    request.touch()
    job.log.say(
        f"megarl: {name}: finishing and saving the current step first{limit}. {again} ends the run at once: then {lost}"
    )
    try:
        why = _why_unsaved(workers, job, grace_s if limited else math.inf)
    finally:
        request.unlink(missing_ok=True)
    # No warning if the run has meanwhile written the steps in another checkpoint, such as its last one.
    if why is not None and _newest(job) < newest + unsaved:
        job.log.say(f"megarl: {lost}, and the run continues from {saved}: {why}")


def _why_unsaved(workers: Workers, job: Job, limit_s: float) -> str | None:
    """Wait until the run has saved; return None, or the reason why it has not."""
    cluster, ranks, request = job.config.cluster, workers.ranks(), job.run_dir / SAVE_REQUEST
    watch = Watch(job.run_dir, ranks, cluster.timeout_s, cluster.start_timeout_s, job.names)
    end = time.monotonic() + limit_s
    while request.exists():
        try:
            if workers.poll():
                return "a worker has ended before the step was saved"
        except WorkerError as error:
            return str(error)
        if (hang := watch.check(ranks)) is not None:
            return hang
        if time.monotonic() > end:
            return f"the step was not saved within cluster.grace_s = {limit_s:g} s"
        time.sleep(_POLL_S)
    return None


def _newest(job: Job) -> int:
    """Return the step of the newest checkpoint, or else of the newest cold-start checkpoint; 0 without either."""
    return max(steps_in(job.run_dir / "checkpoints") or steps_in(job.run_dir / COLD_START), default=0)


def _unsaved(job: Job, newest: int) -> int:
    """Return how many steps were completed after step `newest`; 0 if the command saves none or is not in its loop."""
    loops, beat = _LOOPS.get(job.entry.rpartition(":")[2]), read_beat(job.run_dir, 0)
    if loops is None or beat is None:
        return 0
    inside = beat.phase.partition("/")[0]
    if inside not in (*loops, *_BETWEEN_STEPS):
        return 0
    return max(0, beat.step - (inside in loops) - newest)
