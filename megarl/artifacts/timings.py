"""Durations of a training run by phase, and its number of devices, read from its run folder.

metrics.jsonl   timing_s/NAME of every step: the slowest rank's seconds
run.json        the recipe: workers and their teams
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.artifacts.jsonl import STEP, read_jsonl
from megarl.system.errors import DataError
from megarl.system.offload_schedule import MOVES

#: Number of first steps that are left out: they allocate memory and load code.
WARM_UP = 2
#: Timings that are also part of other phases, so that a sum over phases leaves them out.
WITHIN_PHASES = frozenset({MOVES, "act", "wait_for_simulators"})
_TIMING = "timing_s/"


@dataclass(frozen=True)
class Timings:
    """How long the nodes and phases of a run took in the steps `first` to `last`, and with which teams."""

    first: int
    last: int
    seconds: Mapping[str, float]  # median over the steps, by node or phase of the step
    # roles and workers of every team, by name; empty: one team of all workers
    teams: Mapping[str, tuple[tuple[str, ...], int]]
    workers: int  # number of workers of all teams


def read_timings(run_dir: Path) -> Timings:
    """Return the timings of a training run's steps after the first `WARM_UP`; the run may be in progress."""
    file = run_dir / "metrics.jsonl"
    try:
        lines = read_jsonl(file, needs=STEP, must_exist=True)
    except OSError as error:
        raise _no_run(file, error) from error
    steps = {line["step"]: line for line in lines if line["stage"] == "train" and line["step"] > 0}
    counted = sorted(steps)[WARM_UP:]
    if not counted:
        raise DataError(
            "this run has too few measured steps",
            where=str(file),
            found=f"{len(steps)} RL steps",
            allowed=f"at least {WARM_UP + 1}, as the first {WARM_UP} do not count",
            fix="let the run make more steps",
        )
    measured: dict[str, list[float]] = {}
    for step in counted:
        for name, value in steps[step].items():
            if name.startswith(_TIMING) and value is not None:
                measured.setdefault(name.removeprefix(_TIMING), []).append(value)
    seconds = {name: statistics.median(values) for name, values in measured.items()}
    teams, workers = _teams(run_dir / "run.json")
    return Timings(counted[0], counted[-1], seconds, teams, workers)


def _teams(file: Path) -> tuple[dict[str, tuple[tuple[str, ...], int]], int]:
    try:
        config = json.loads(file.read_text())["config"]
        teams = {name: (tuple(team["roles"]), team["devices"]) for name, team in config["placement"]["teams"].items()}
        return teams, config["cluster"]["nproc"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_run(file, error) from error


def _no_run(file: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or getattr(error, "what", None) or f"{type(error).__name__}: {error}"
    return DataError(
        f"this is not the record of a training run ({reason.lower()})",
        where=getattr(error, "where", None) or str(file),
        allowed="a run folder of megarl train, with metrics.jsonl and run.json",
        fix="use RUNS/<name>/<stamp>",
    )
