"""Files of RUN_DIR/launch that a job reads and writes, and commands of Slurm."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

ANSWER_S = 60.0
LOOK_S = 0.5
#: The driver writes to `alive` so often.
ALIVE_S = 5.0


class CommandFailed(Exception):
    """A command of Slurm failed; the message is what it said."""


def answer(*command: str) -> str:
    """What a command of Slurm prints.

    Raises:
        CommandFailed: it failed, or gave no answer within a minute.
    """
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
    """Fields of `scontrol show ... --oneliner`; values with blanks are cut."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


class Folder:
    """RUN_DIR/launch."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.path = run_dir, run_dir / "launch"
        self.plan: dict[str, Any] = json.loads((self.path / "plan.json").read_text())
        self._told_alive = 0.0

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Lines of a file of JSON lines, which may not be there."""
        file = self.path / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def add(self, file: Path, line: dict[str, Any]) -> None:
        """Add a line to such a file."""
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def state(self) -> dict[str, Any]:
        """What the jobs of a run know of each other."""
        return json.loads((self.path / "state.json").read_text())

    def set_state(self, **values: Any) -> None:
        """Change some of it."""
        file = self.path / "state.json"
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps({**self.state(), **values}))
        draft.replace(file)

    def newest(self) -> int:
        """Step of the newest complete checkpoint; -1: there is none."""
        steps = [file.parent.name[5:] for file in (self.run_dir / "checkpoints").glob("step_*/meta.json")]
        return max((int(step) for step in steps if step.isdigit()), default=-1)

    def begun(self) -> bool:
        """The run has begun since it was submitted."""
        record = self.run_dir / "run.json"
        process = json.loads(record.read_text()).get("process") if record.is_file() else None
        return process != self.state()["process"]

    def say(self, job: str, kind: str, text: str) -> None:
        """Print what happens in a job, and note it."""
        print(f"megarl: {text}", flush=True)
        self.add(self.path / "events.jsonl", {"time": time.time(), "job": job, "kind": kind, "text": text})

    def tell_alive(self) -> None:
        """For the guard; cheap enough to be called in every loop."""
        if time.monotonic() - self._told_alive > ALIVE_S:
            self._told_alive = time.monotonic()
            (self.path / "alive").write_text(repr(time.time()))
