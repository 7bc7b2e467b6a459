"""Attempts at a run, which is started again from its newest checkpoint when it loses a worker (`cluster.max_restarts`).

    start -> supervise -> finished, or an error that would recur                -> the exit code
               ^      \\-> a worker died, hung, or lost another one            -> all workers end
               |                                                                    |
               +---- from the newest checkpoint, while a restart is left <----------+

The budget counts restarts in a row: a new checkpoint since the last failure refills it, so that a run of a month
outlives any number of lost machines, and one that always dies at the same place ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from megarl.artifacts.run_folder import COLD_START
from megarl.artifacts.trained import steps_in
from megarl.launchers.common import Job, Workers, clear, prepare, process_of
from megarl.launchers.interrupt import save_first
from megarl.launchers.supervise import End, supervise
from megarl.runtime.health import forget, forget_dead, keep_attempt, old_errors
from megarl.system.errors import MegarlError
from megarl.tracking.close import close_mlflow, note_restart, show_end

RETRY_S = 5.0  # seconds between attempts to restart: a machine may come back


def next_start(run_dir: Path, resume: str, *, begun: bool) -> tuple[str, str]:
    """Return `trainer.resume` for the next attempt, and a description of the checkpoint from which it continues.
    `begun`: whether the run has begun; if not, the checkpoints in the folder are an earlier run's.
    """
    steps = steps_in(run_dir / "checkpoints") if begun or resume == "auto" else []
    if steps:
        text = f"from the checkpoint of step {max(steps)}"
    elif resume in ("auto", "never") and (cold := steps_in(run_dir / COLD_START) if begun or resume == "auto" else []):
        text = f"from the checkpoint of step {max(cold)} of the cold start"
    elif resume in ("auto", "never"):
        text = "there is no checkpoint yet: from the beginning"
    else:
        text = f"this run has no checkpoint yet: again from {resume}"
    # Only `auto` resumes from this run's own checkpoints: `never` would begin again, and a path names another one.
    uses_this_run = begun and (resume == "never" or (resume != "auto" and steps))
    return text, "auto" if uses_this_run else resume


class Attempts:
    """All attempts that one command makes at a run."""

    def __init__(self, start: Callable[[Job], Workers], job: Job) -> None:
        self._start, self._job = start, job
        self._workers: Workers | None = None
        self._before = process_of(job.run_dir)
        self._attempt = 1
        self._used = 0  # restarts since the last new checkpoint
        self._newest = -1  # step of the newest checkpoint at the last failure
        self._place: tuple[str, str, int] | None = None  # type, phase and step of the last failure
        #: Whether workers were ever started.
        self.started = False

    def run(self) -> int:
        """Run all attempts; return the exit code of the command: 0, 1 or 2. Raise MegarlError if the first start was
        refused or failed.
        """
        if self._job.machine == 0:
            forget(self._job.run_dir)
        else:
            forget_dead(self._job.run_dir)
            self._job = dataclasses.replace(self._job, old=old_errors(self._job.run_dir))
        end = supervise(self._begin(), self._job)
        while end.exit_code and self._restart_is_left(end):
            workers = self._begin_again(end)
            if workers is None:
                break
            end = supervise(workers, self._job)
        if end.exit_code and self._job.config.cluster.max_restarts and self._has_begun():
            show_end(self._job.run_dir)
        return end.exit_code

    def save_first(self, number: int) -> None:
        """Let the workers save their unsaved steps before `stop`; `number` is the signal that requests the stop."""
        if self._workers is not None:
            save_first(self._workers, self._job, number)

    def stop(self) -> None:
        """End all workers; may be called at any time."""
        if self._workers is not None:
            self._workers.stop()
            self._workers = None

    def _has_begun(self) -> bool:
        return process_of(self._job.run_dir) != self._before

    def _begin(self) -> Workers:
        self._job = prepare(self._job)
        self._workers = self._start(self._job)
        self.started = True
        return self._workers

    def _restart_is_left(self, end: End) -> bool:
        """Return whether to restart after `end`; if restarts are configured but not possible, log why."""
        most, say = self._job.config.cluster.max_restarts, self._job.log.say
        if not most:
            return False
        if self._job.lock is not None and not self._job.lock.is_ours():
            say("megarl: the run is not restarted: another command is using its folder")
            return False
        newest = max(steps_in(self._job.run_dir / "checkpoints"), default=-1)
        if newest > self._newest:
            self._used = 0
        again = end.place is not None and end.place == self._place
        self._newest, self._place = newest, end.place
        if end.repeats or (again and self._used):
            why = (
                "the same error occurred before, at the same step" if not end.repeats else "the error would occur again"
            )
            say(f"megarl: the run is not restarted: {why}")
            return False
        if self._used == most:
            say(f"megarl: no restart is left: {most} without a new checkpoint (cluster.max_restarts)")
            return False
        self._used += 1
        return True

    def _begin_again(self, end: End) -> Workers | None:
        """Start the workers of the next attempt; return None, after logging the error, if they could not be started."""
        job, cluster = self._job, self._job.config.cluster
        self.stop()
        self._set_aside()
        start, resume = next_start(job.run_dir, job.config.trainer.resume, begun=self._has_begun())
        trainer = job.config.trainer.model_copy(update={"resume": resume})
        self._job = dataclasses.replace(job, config=job.config.model_copy(update={"trainer": trainer}))
        again = f"{job.config.name} starts again ({self._used} of {cluster.max_restarts}; {start})"
        job.log.say(f"megarl: {again}: {end.why}")
        close_mlflow(job.run_dir, "failed")  # a resumed run opens the MLflow run again
        note_restart(job.run_dir, end.why, start)
        deadline = time.monotonic() + cluster.start_timeout_s
        while True:
            try:
                return self._begin()
            except Exception as error:  # the retry may lack machines or devices that existed before
                if isinstance(error, MegarlError) and error.repeats:
                    job.log.say(f"megarl: the restart was refused: {error}")
                    return None
                if time.monotonic() > deadline:
                    job.log.say(f"megarl: the restart failed for {cluster.start_timeout_s:g} s: {error}")
                    return None
                job.log.record("launcher", f"not started again yet: {error}")
            self._set_aside()
            time.sleep(RETRY_S)

    def _set_aside(self) -> None:
        """Move the files of an attempt's workers away, so that the next attempt does not read them; errors are kept."""
        clear(self._job.run_dir)
        keep_attempt(self._job.run_dir, self._attempt)
        self._attempt += 1
