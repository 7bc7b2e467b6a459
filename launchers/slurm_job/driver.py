"""The driver of one job; the package's docstring shows its work."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from .files import ANSWER_S, LOOK_S, CommandFailed, Folder, answer, fields_of, read_object, with_exclusion
from .guard import GUARD_S
from .nodes import ONE_NODE, Nodes

#: Seconds before its end at which a job stops waiting for a checkpoint, so that it can still queue the next job.
LEFT_S = 20


class Over(Exception):
    """Raised to end the job with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class SlurmJob:
    """One Slurm job of a run: it tests the nodes, runs the attempts and handles signals."""

    def __init__(self, run_dir: Path) -> None:
        self.files, self.job = Folder(run_dir), os.environ["SLURM_JOB_ID"]
        # Always set it: a job that another job submitted inherits the other job's value.
        os.environ["MEGARL_JOB_BEGAN"] = os.environ.get("SLURM_JOB_START_TIME") or repr(time.time())
        self.plan = self.files.plan
        self.nodes: Nodes  # set by `_begin`, from the nodes that Slurm reports when the job begins
        self.allocated: list[str] = []
        self.good: list[str] = []
        self.attempt = 0
        self.guard: subprocess.Popen[bytes] | None = None
        self.guarded, self.guards = 0.0, 0  # time of the guard's last start, and number of its starts
        self.ended = False
        self.warned: float | None = None  # time at which Slurm's warning of the time limit came; None: not yet
        self.deferred = False  # whether Slurm's warning came before the run was started, and no job follows

    def run(self) -> int:
        """Run the job; return its exit code."""
        signal.signal(signal.SIGUSR1, self._on_warning)
        signal.signal(signal.SIGTERM, self._on_end)
        try:
            self._begin()
            while True:
                self._handle_signals()
                nodes = self._choose()
                code = self._watch(self._start(nodes))
                if code == 0:
                    self._finish()
                    return 0
                if self._preempted():
                    self._requeue("preempted; it continues from its newest checkpoint")
                lost = self._exclude(self.nodes.roll_call(nodes), "lost")
                if not lost:
                    self.say("failed", f"the run ended with exit code {code}; all its nodes reply")
                    return code
                if self._chosen():
                    self._restart(lost, "in this job")
        except Over as over:
            return over.code
        except CommandFailed as error:
            self.say("failed", str(error))
            return 1
        finally:
            self._end_guard()

    def say(self, kind: str, text: str) -> None:
        """Print an event, and record it."""
        self.files.say(self.job, kind, text)

    def _on_warning(self, number: int, frame: object) -> None:
        self.warned = time.monotonic()

    def _on_end(self, number: int, frame: object) -> None:
        self.ended = True

    def _check_signals(self) -> None:
        """Handle a signal that arrived while nodes are tested; raise Over, which ends the job, before a test that the
        signal interrupted counts against a node.

        When an attempt of the run has failed, Slurm's warning of the time limit is handled only LEFT_S seconds before
        the job's end, so that the tests can first find the nodes that caused the failure.
        """
        self.files.write_heartbeat()
        late = self.warned is not None and time.monotonic() > self.warned + self.plan["warn_s"] - LEFT_S
        if self.ended or late or not self.attempt:
            self._handle_signals()

    def _finish(self) -> None:
        """Finish a run that is over; if it saved before the time limit (trainer.save_by_s), submit the next job."""
        if read_object(self.files.run_dir / "run.json").get("status") != "stopped":
            self.say("finished", "the run has ended")
            return
        left = self.files.chain()
        if not left:
            self.say("finished", "the run has saved and ended before the time limit, and no job of the chain is left")
            return
        self.say("limit", "the run has saved and ended before the time limit")
        self._next_job()
        self.files.set_chain(left - 1)

    def _handle_signals(self) -> None:
        """Handle signals that arrived while the run was not running. Raise Over if the job has to end."""
        if self.ended:
            raise self._stopped()
        if self.warned is not None and not self.deferred:
            self._before_the_end(None)

    def _stopped(self) -> Over:
        self.say("stopped", "stopped by SIGTERM: scancel, preemption, or the end of the time limit")
        return Over(143)

    def _begin(self) -> None:
        """Find the usable nodes. Slurm may have requeued the job since it last ran."""
        self.nodes = Nodes(self.files, self.job, self._check_signals)
        self.allocated = list(self.nodes.group_of)
        again = os.environ.get("SLURM_RESTART_COUNT")
        if again:
            before = self.files.state()["on"] if self.files.state()["job"] == self.job else []
            gone = self._exclude({node: state for node in before if (state := self.nodes.lost_state(node))}, "lost")
            self.say("again", f"Slurm restarted job {self.job} (restart {again})")
            if gone:
                self._restart(gone, "in this job")
        known = set(self.files.excluded())
        self.good = [node for node in self.allocated if node not in known]
        if self.plan["preflight"] and self.good:
            self._exclude(self.nodes.preflight(self.good), "failed its pre-flight")

    def _choose(self) -> list[str]:
        """Return the nodes of the next attempt. Raise Over if there are too few; the chain may allow a next job."""
        if nodes := self._chosen():
            return nodes
        reasons = self.files.excluded()
        failures = "; ".join(f"{node}: {reasons[node]}" for node in self.allocated if node in reasons)
        self.say(
            "too few",
            f"cluster.nnodes: {len(self.good)} of the {len(self.allocated)} nodes of this job can be used\n"
            f"  found:   {failures}\n  allowed: {self.plan['nodes']} nodes\n"
            f"  fix:     launch.spares, or repair them and remove their lines from {self.files.path}/excluded.jsonl",
        )
        self._count_failure()
        self._next_job()
        raise Over(1)

    def _chosen(self) -> list[str]:
        chosen: list[str] = []
        for number, group in enumerate(self.plan["groups"]):
            nodes = [node for node in self.good if self.nodes.group_of[node] == number]
            if len(nodes) < group["nodes"]:
                return []
            chosen += nodes[: group["nodes"]]
        return chosen

    def _restart(self, lost: list[str], where: str) -> None:
        """Record that the run restarts without these nodes. Raise Over if no restart is left."""
        self._count_failure()
        newest = self.files.newest()
        at = f"from the checkpoint of step {newest}"
        start = at if newest >= 0 else "there is no checkpoint yet: from the beginning"
        why = f"lost {', '.join(lost)}"
        self.say("restart", f"{why}: the run starts again {where}, {start}")
        file = self.files.run_dir / "restarts.jsonl"
        number = len(file.read_text().splitlines()) + 1 if file.is_file() else 1
        self.files.add(file, {"restart": number, "time": time.time(), "why": why, "start": start})

    def _count_failure(self) -> None:
        state, newest = self.files.state(), self.files.newest()
        failures = 1 + (0 if newest > state["newest"] else state["failures"])
        self.files.set_state(failures=failures, newest=newest)
        if failures > self.plan["restarts"]:
            limit = self.plan["restarts"]
            self.say("ended", f"no restart is left: {limit} without a new checkpoint (launch.slurm.restarts)")
            raise Over(1)

    def _exclude(self, bad: dict[str, str], what: str) -> list[str]:
        """Exclude nodes from now on, each with a reason; return their names."""
        for node, reason in bad.items():
            line = {"time": time.time(), "job": self.job, "node": node, "reason": f"{what}: {reason}"}
            self.files.add(self.files.path / "excluded.jsonl", line)
            self.say("excluded", f"{node} is excluded from now on: {what}: {reason}")
        self.good = [node for node in self.good if node not in bad]
        return list(bad)

    # -- other jobs

    def _next_job(self) -> None:
        """Submit the job that continues the run when this job has ended."""
        self._end_guard()  # otherwise the guard could requeue this job in addition to the next one
        script = self.files.path / "job.sh"
        options = [f"--dependency=afterany:{self.job}"]
        wanted, spares = self.plan["nodes"], self.plan["spares"]
        if spares:  # a small cluster may have no spare nodes left, for which the job must not wait
            options.append(f"--nodes={wanted}-{wanted + spares}")
        if names := [*self.plan["exclude"], *self.files.excluded()]:
            text = with_exclusion(script.read_text(), names)
            script = self.files.path / "next.sh"
            script.write_text(text)
        try:
            number = answer("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]
        except CommandFailed as error:
            self.say("ended", f"Slurm refuses the next job: {error}")
            raise Over(1) from error
        self.files.note_job(number)
        self.say("next", f"job {number} continues the run")

    def _slurm_fields(self) -> dict[str, str]:
        """Return Slurm's fields of this job; empty when Slurm does not reply."""
        try:
            return fields_of(answer("scontrol", "show", "job", "--oneliner", self.job))
        except CommandFailed as error:
            print(f"megarl: Slurm does not report job {self.job}: {error}", flush=True)
            return {}

    def _preempted(self) -> bool:
        return self._slurm_fields().get("PreemptTime", "None") != "None"

    def _left_s(self) -> float:
        """Return the seconds until the job's time limit, or the end of its grace period: warnings may be early."""
        try:
            end = time.mktime(time.strptime(self._slurm_fields()["EndTime"], "%Y-%m-%dT%H:%M:%S"))
        except (KeyError, ValueError):
            return float(self.plan["warn_s"]) - (time.monotonic() - (self.warned or time.monotonic()))
        return end - time.time()

    def _requeue(self, why: str) -> None:
        """Requeue this job, which ends this program. If Slurm refuses, submit the next job and raise Over."""
        self.say("preempted", why)
        self._end_guard()
        try:
            answer("scontrol", "requeue", self.job)
            time.sleep(2 * ANSWER_S)
            self.say("ended", f"Slurm accepted the requeue, but did not end job {self.job} within {2 * ANSWER_S:.0f} s")
        except CommandFailed as error:
            print(f"megarl: Slurm does not requeue the job ({error}); the next job continues the run", flush=True)
            self._next_job()
        raise Over(1)

    # -- steps

    def _start(self, nodes: list[str]) -> subprocess.Popen[bytes]:
        self.attempt += 1
        (self.files.path / "save").unlink(missing_ok=True)
        self.files.set_state(on=nodes, job=self.job)
        resume = self.plan["resume"]
        uses_this_run = self.files.begun() and (resume == "never" or self.files.newest() >= 0)
        more = ["trainer.resume=auto"] if resume not in (None, "auto") and uses_this_run else []
        spare = [node for node in self.good if node not in nodes]
        spares = f", spare: {', '.join(spare)}" if spare else ""
        self.say("started", f"attempt {self.attempt} of job {self.job} on {', '.join(nodes)}{spares}")
        return self.nodes.start(nodes, more, "job-%j.TEAM-%n.txt")

    def _watch(self, step: subprocess.Popen[bytes]) -> int:
        """Wait for a step; return its exit code. Raise Over if the job has to end."""
        while (code := step.poll()) is None:
            self.files.write_heartbeat()
            self._keep_guard()
            if self.ended:
                self.nodes.stop(step)
                raise self._stopped()
            if self.warned is not None:
                self._before_the_end(step)
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(LOOK_S)
        if self.ended and code:  # Slurm also ends the step, so its error code does not prove that the run failed
            raise self._stopped()
        return code

    def _before_the_end(self, step: subprocess.Popen[bytes] | None) -> None:
        """Handle Slurm's warning of the job's end. Raise Over if a next job, or this one again, continues the run."""
        preempted = self._preempted()
        left = self.files.chain()
        why = "the job is preempted" if preempted else "the time limit is near"
        goes_on = preempted or left > 0
        if step is None and not goes_on:
            self.deferred = True
            return
        if step is None:
            self.say("limit", f"{why} before the run was started")
        elif not self._save(step, why, goes_on):
            return
        if preempted:
            if step is not None:
                self.nodes.stop(step, LEFT_S / 2)
            self._requeue("preempted; the job is queued again")
        self._next_job()
        self.files.set_chain(left - 1)
        if step is not None:
            self.nodes.stop(step)  # last, because stopping the step may take more time than the job has left
        raise Over(0)

    def _save(self, step: subprocess.Popen[bytes], why: str, goes_on: bool) -> bool:
        """Request a checkpoint from the run; return whether the job has to end now. `goes_on`: another job follows."""
        save, self.deferred = self.files.path / "save", False
        save.touch()
        if not goes_on:
            self.warned = None
            self.say("limit", f"{why}, and no job of the chain is left; a checkpoint is written")
            return False
        wait_s = max(1, int(self._left_s()) - LEFT_S)
        self.say("limit", f"{why}: requesting a checkpoint, waiting at most {wait_s} s")
        end = time.monotonic() + wait_s
        while save.exists() and step.poll() is None and time.monotonic() < end and not self.ended:
            self.files.write_heartbeat()
            time.sleep(LOOK_S)
        if step.poll() is not None:  # the run ended in the meantime, and the caller handles its exit code
            return False
        if save.exists():
            print("megarl: no checkpoint was written in time; the run continues from an earlier one", flush=True)
        return not self.ended

    def _keep_guard(self) -> None:
        """If the job has spare nodes, keep guard.py running on another node, where it watches this node."""
        here = os.environ.get("SLURMD_NODENAME")
        others = [node for node in reversed(self.good) if node != here]
        runs = self.guard is not None and (self.guard.poll() is None or time.monotonic() < self.guarded + GUARD_S)
        if not self.plan["spares"] or not others or runs:
            return
        self.files.write_heartbeat()
        # each start takes the next node of the list, because the previous node may have ended the guard
        node = others[self.guards % len(others)]
        self.guarded, self.guards = time.monotonic(), self.guards + 1
        command = [sys.executable, "-m", "slurm_job", str(self.files.run_dir), "guard"]
        place = [*ONE_NODE, f"--nodelist={node}", f"--chdir={self.files.path}"]
        self.guard = subprocess.Popen(["srun", *place, *command], stdin=subprocess.DEVNULL)

    def _end_guard(self) -> None:
        if self.guard is not None:
            self.nodes.stop(self.guard, 5.0)  # wait only 5 s: the guard's node may be lost
            self.guard = None
