"""Submits a run to Slurm, and queries its jobs.

write_scripts    job.sh, node.sh, recipe.yaml in RUN_DIR/launch
check_cluster    sbatch is here, the partition exists, and `sbatch --test-only` takes the script
submit           -> number of the job, kept in RUN_DIR/launch/jobs.txt
state_of         of a job that waits, runs, or has ended
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megarl.artifacts.jsonl import read_jsonl
from megarl.artifacts.records import read_record
from megarl.artifacts.run_folder import LAUNCH_FOLDER
from megarl.config.load import dump_config
from megarl.launchers import slurm_job
from megarl.launchers.common import process_of
from megarl.launchers.slurm import (
    CHAIN,
    DRIVER,
    EVENTS,
    EXCLUDED,
    JOB,
    JOBS,
    NODE,
    PLAN,
    RECIPE,
    STATE,
    TESTS,
    Submission,
    job_script,
    node_script,
    plan,
    saved_in_time,
)
from megarl.launchers.slurm_job.files import ANSWER_S, with_exclusion
from megarl.system.errors import ConfigError, UnavailableError, UserError, close_matches
from megarl.system.processes import write_atomically

#: Text in sbatch's error, in lower case -> the recipe key that it is about.
_ABOUT = {
    "account": "launch.slurm.account",
    "partition": "launch.slurm.partition",
    "qos": "launch.slurm.qos",
    "time limit": "launch.slurm.time",
    "node count": "cluster.nnodes",
    "node configuration": "cluster.nnodes, launch.slurm.gpus_per_node, gres, cpus_per_node or constraint",
    "generic resource": "launch.slurm.gres",
    "invalid feature": "launch.slurm.constraint",
}
#: States of jobs that have not ended.
ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "STOPPED")


class SubmittedJob(NamedTuple):
    """A line of jobs.txt."""

    number: str
    submitted: str
    nodes: str


@dataclass(frozen=True)
class JobState:
    """Slurm's state of a job.

    Attributes:
        name: Slurm's name of the state, such as `RUNNING`; `ENDED`: Slurm does not list the job any more.
        ran, limit: times in Slurm's format.
        nodes: names of the nodes, or the reason for waiting in parentheses.
    """

    name: str
    ran: str = ""
    limit: str = ""
    nodes: str = ""

    @property
    def active(self) -> bool:
        """Whether the job has not ended: it is queued, running or suspended."""
        return self.name in ACTIVE


def write_scripts(job: Submission) -> Path:
    """Write the files that the job needs; return the path of the batch script."""
    job.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(job.folder / RECIPE, dump_config(saved_in_time(job)))
    write_atomically(job.folder / NODE, node_script(job))
    write_atomically(job.folder / JOB, job_script(job))
    write_atomically(job.folder / PLAN, json.dumps(plan(job), indent=1) + "\n")
    source = Path(slurm_job.__file__).parent
    shutil.copytree(source, job.folder / DRIVER, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return job.folder / JOB


def check_cluster(job: Submission) -> None:
    """Check a submission with Slurm before anything is written. Raise UserError if Slurm is missing, does not reply, or
    refuses the job.
    """
    wanted = job.slurm.partition
    partitions = sorted({line.rstrip("*") for line in _ask("sinfo", "--noheader", "--format=%R").split()})
    if wanted is not None and not set(wanted.split(",")) <= set(partitions):
        missing = [name for name in wanted.split(",") if name not in partitions]
        close = close_matches(missing[0], partitions)
        raise ConfigError(
            f"Slurm on this cluster has no partition {missing[0]!r}",
            where="launch.slurm.partition",
            found=wanted,
            allowed=partitions,
            fix=f"did you mean {close[0]}?" if close else "choose one of these, or omit the key for Slurm's default",
        )
    pyxis = job.slurm.image is not None and job.slurm.container != "apptainer"
    if pyxis and "--container-image" not in _ask("srun", "--help"):
        raise ConfigError(
            "this Slurm cannot start containers: pyxis is missing",
            where="launch.slurm.image",
            found=job.slurm.image,
            fix="set launch.slurm.container=apptainer if nodes have it, or remove the image",
        )
    _sbatch(_leaving_out(job, job_script(job)), "--test-only")


def prepare(job: Submission) -> None:
    """Reset the state that the jobs of this submission share."""
    state = {"failures": 0, "newest": -1, "on": [], "job": "", "process": process_of(job.run_dir)}
    write_atomically(job.folder / STATE, json.dumps(state))
    write_atomically(job.folder / CHAIN, f"{job.slurm.chain}\n")


def submit(job: Submission) -> str:
    """Submit the script that `write_scripts` wrote; return the job's number."""
    prepare(job)
    script = _leaving_out(job, (job.folder / JOB).read_text())
    number = _sbatch(script, "--parsable").strip().partition(";")[0]
    with (job.folder / JOBS).open("a") as file:  # jobs of a chain add their numbers later
        file.write(f"{number}\t{time.strftime('%Y-%m-%d %H:%M:%S')}\t{job.config.cluster.nnodes}\n")
    return number


def excluded(run_dir: Path) -> dict[str, str]:
    """Return the nodes that the jobs of a run exclude, with reasons."""
    lines = read_jsonl(run_dir / LAUNCH_FOLDER / EXCLUDED, needs={"node": str, "reason": str})
    return {line["node"]: line["reason"] for line in lines}


def notes_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events in the jobs of a run in order, each with time, job, kind and text."""
    path = run_dir / LAUNCH_FOLDER / EVENTS
    return read_jsonl(path, needs={"time": (int, float), "job": str, "kind": str, "text": str})


def latest_tests(run_dir: Path) -> dict[str, str]:
    """Return the results of the last pre-flight, one line per node."""
    folders = [file.parent for file in (run_dir / LAUNCH_FOLDER / TESTS).glob("*/failed.json")]
    if not folders:
        return {}
    folder = max(folders, key=lambda path: (path / "failed.json").stat().st_mtime)
    results = {}
    for file in sorted(folder.glob("*.json")):
        if file.stem not in ("failed", "links"):
            checks = read_record(file).get("checks", {})
            reasons = ", ".join(f"{name}: {check['reason']}" for name, check in checks.items())
            results[file.stem] = f"passed ({reasons})"
    return results | {node: f"failed ({reason})" for node, reason in read_record(folder / "failed.json").items()}


def _leaving_out(job: Submission, script: str) -> str:
    """Return the script with an exclusion of all nodes that this run has excluded so far."""
    names = excluded(job.run_dir)
    return with_exclusion(script, [*plan(job)["exclude"], *names] if names else [])


def jobs_of(run_dir: Path) -> list[SubmittedJob]:
    """Return the jobs submitted for a run folder, in order."""
    file = run_dir / LAUNCH_FOLDER / JOBS
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    rows = (line.strip("\0").split("\t") for line in lines)
    return [
        SubmittedJob(*fields) for fields in rows if len(fields) == len(SubmittedJob._fields) and fields[0].isdecimal()
    ]


def state_of(number: str) -> JobState:
    """Return Slurm's state of a job."""
    try:
        answer = _ask("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%M|%l|%R")
    except UnavailableError as error:
        if "invalid job id" in str(error).lower():
            return JobState("ENDED")
        raise
    return JobState(*answer.strip().splitlines()[0].split("|", 3)) if answer.strip() else JobState("ENDED")


def cancel(number: str) -> None:
    """Cancel a Slurm job."""
    _ask("scancel", number)


def _sbatch(script: str, *options: str) -> str:
    done = _run("sbatch", *options, script=script)
    if done.returncode == 0:
        return done.stdout
    lines = [line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines()]
    message = "; ".join(line for line in lines if line) or f"exit code {done.returncode}"
    where = next((key for word, key in _ABOUT.items() if word in message.lower()), "sbatch")
    raise ConfigError(f"Slurm refuses the job: {message}", where=where, fix="sinfo shows partitions, limits and nodes")


def _ask(program: str, *arguments: str) -> str:
    done = _run(program, *arguments)
    if done.returncode:
        lines = dict.fromkeys(line.partition("error: ")[2] or line for line in done.stderr.splitlines() if line.strip())
        raise UnavailableError(
            f"{program} failed: {'; '.join(lines) or f'exit code {done.returncode}'}",
            where=" ".join([program, *arguments]),
            fix="if slurm.conf is missing here, or Slurm's controller does not reply, run this on a login node of the "
            "cluster; --dry-run shows the script anywhere",
        )
    return done.stdout


def _run(program: str, *arguments: str, script: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm with `script` as its input. Raise UserError if it is not installed, UnavailableError if it
    takes longer than a minute.
    """
    if shutil.which(program) is None:
        raise UserError(
            "Slurm's commands are not installed on this machine",
            where=program,
            fix="run this where sbatch works (a login node of the cluster); --dry-run shows the script anywhere",
        )
    command = [program, *arguments]
    try:
        return subprocess.run(command, input=script, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"Slurm did not reply within {ANSWER_S:.0f} s",
            where=program,
            fix="try again later; sinfo shows whether the cluster's controller is running",
        ) from error
