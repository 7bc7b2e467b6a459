"""Files of RUN_DIR/launch that a job uses, Slurm's commands, and nodes that sbatch excludes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ANSWER_S = 60.0
LOOK_S = 0.5
#: Seconds between the driver's heartbeats in `alive`.
ALIVE_S = 5.0
_EXCLUDE = re.compile(r"(?:--exclude(?:=|\s+)|-x\s*)(\S+)")


class CommandFailed(Exception):
    """A command of Slurm failed; the message is its output."""


def answer(*command: str) -> str:
    """Return the output of a command of Slurm. Raise CommandFailed if it failed, or did not finish within a minute."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(str(error)) from error
    if done.returncode:
        # scontrol prints some of its errors to stdout
        raise CommandFailed(done.stderr.strip() or done.stdout.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def fields_of(line: str) -> dict[str, str]:
    """Return the fields of `scontrol show ... --oneliner`; values with spaces are cut."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


class Folder:
    """The folder RUN_DIR/launch, through which the driver, the guard and the steps of a Slurm job exchange files."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.path = run_dir, run_dir / "launch"
        self.plan = self._plan()
        self._told_alive = 0.0

    def _plan(self) -> dict[str, Any]:
        """Read the plan that `megarl launch` wrote for the driver. Raise SystemExit if it is missing or damaged."""
        plan = read_object(self.path / "plan.json")
        if not plan:
            raise SystemExit(
                f"megarl: {self.path / 'plan.json'} is missing or damaged, and this job cannot run without it\n  fix: "
                f"    write it again with megarl launch RECIPE --slurm --run-dir {self.run_dir}"
            )
        return plan

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a JSON Lines file; damaged lines are skipped, and a missing file has none."""
        try:
            text = (self.path / name).read_text(errors="replace")
        except OSError:
            return []
        return [line for line in map(_parsed, text.splitlines()) if line]

    def excluded(self) -> dict[str, str]:
        """Return the nodes that the job no longer uses, each with the reason."""
        lines = [line for line in self.lines("excluded.jsonl") if "node" in line]
        return {str(line["node"]): str(line.get("reason", "")) for line in lines}

    def add(self, file: Path, line: dict[str, Any]) -> None:
        """Append a line to a JSON Lines file."""
        self._write(file, json.dumps(line))

    def _write(self, file: Path, line: str, mode: str = "a") -> None:
        """Write a line. A full disk is reported on the console and otherwise ignored."""
        try:
            with file.open(mode) as out:
                out.write(line + "\n")
        except OSError as error:
            print(f"megarl: {file} cannot be written: {error}", flush=True)

    def state(self) -> dict[str, Any]:
        """Return the state that the jobs of a run share; the state at the start of the first job if the file is missing
        or damaged.
        """
        first: dict[str, Any] = {"process": None, "failures": 0, "newest": -1, "on": [], "job": ""}
        return {**first, **read_object(self.path / "state.json")}

    def set_state(self, **values: Any) -> None:
        """Change entries of the state that the jobs of a run share. If the disk is full, print this; the next job then
        reads the old entries.
        """
        file = self.path / "state.json"
        draft = file.with_suffix(".tmp")
        try:
            with draft.open("w") as out:
                out.write(json.dumps({**self.state(), **values}))
                out.flush()
                os.fsync(out.fileno())
            draft.replace(file)
        except OSError as error:
            print(f"megarl: {file} cannot be written: {error}", flush=True)

    def chain(self) -> int:
        """Return how many further jobs may continue the run after this job."""
        try:
            return int((self.path / "chain").read_text())
        except (OSError, ValueError) as error:
            print(f"megarl: {self.path / 'chain'} cannot be read, so no job follows: {error}", flush=True)
            return 0

    def set_chain(self, left: int) -> None:
        """Record how many further jobs may continue the run after this job."""
        self._write(self.path / "chain", f"{left}", "w")

    def note_job(self, number: str) -> None:
        """Add a job to the list of submitted jobs."""
        self._write(self.path / "jobs.txt", f"{number}\t{time.strftime('%Y-%m-%d %H:%M:%S')}\t{self.plan['nodes']}")

    def newest(self) -> int:
        """Return the step of the newest complete checkpoint; -1 without one."""
        steps = [file.parent.name[5:] for file in (self.run_dir / "checkpoints").glob("step_*/meta.json")]
        return max((int(step) for step in steps if step.isdigit()), default=-1)

    def begun(self) -> bool:
        """Return whether the run has begun since it was submitted."""
        return read_object(self.run_dir / "run.json").get("process") != self.state()["process"]

    def say(self, job: str, kind: str, text: str) -> None:
        """Print an event of a job, and record it."""
        print(f"megarl: {text}", flush=True)
        self.add(self.path / "events.jsonl", {"time": time.time(), "job": job, "kind": kind, "text": text})

    def write_heartbeat(self) -> None:
        """Write a heartbeat, by which the guard sees that this driver lives; cheap enough for every loop."""
        if time.monotonic() - self._told_alive > ALIVE_S:
            self._told_alive = time.monotonic()
            try:
                (self.path / "alive").write_text(repr(time.time()))
            except OSError:  # on a full disk only the file's time can be set, and the guard reads only that
                with contextlib.suppress(OSError):
                    os.utime(self.path / "alive")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or holds something else."""
    try:
        return _parsed(file.read_text(errors="replace"))
    except OSError:
        return {}


def _parsed(text: str) -> dict[str, Any]:
    """Return the JSON object in a text; empty if it is something else."""
    try:
        value = json.loads(text.strip("\0 \n"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def excluded_by(options: Iterable[str]) -> list[str]:
    """Return the nodes that options of sbatch exclude: `--exclude=NODES`, `--exclude NODES` or `-x NODES`."""
    return [match[1] for option in options if (match := _EXCLUDE.fullmatch(option.strip()))]


def with_exclusion(script: str, nodes: Iterable[str]) -> str:
    """Return a batch script that excludes these nodes in all its components; a command-line option would affect only
    the first. The last `--exclude` of a component counts, so `nodes` must include the nodes that the script
    already excludes.
    """
    text = ",".join(dict.fromkeys(nodes))
    if not text:
        return script
    value = text if shlex.quote(text) == text else '"' + text + '"'
    option = f"#SBATCH --exclude={value}"
    lines = script.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
    changed = list[str]()
    for number, line in enumerate(lines):
        changed += [option] if line == "#SBATCH hetjob" else []
        changed += [line, option] if number == last else [line]
    return "\n".join(changed) + "\n"
