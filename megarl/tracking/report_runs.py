"""Run folders as report.html shows them: run.json, and each metric as a series of points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import read_jsonl
from megarl.artifacts.records import read_run
from megarl.artifacts.trained import run_folder_fix
from megarl.system.errors import DataError

MAX_POINTS = 1500  # most points per line; more are averaged in bins
_NOT_METRICS = ("step", "stage", "time")
Points = tuple[list[int], list[float | None]]


@dataclass
class Run:
    """One run folder: run.json, and for each stage and metric its points in order of steps.

    `label` distinguishes the run from other runs of a page; it is empty until a page sets it.
    """

    folder: Path
    info: dict[str, Any]
    series: dict[str, dict[str, Points]]
    label: str = ""

    @property
    def name(self) -> str:
        """Run name; the folder's when run.json is missing."""
        return str(self.info.get("name") or self.folder.name)

    def main_stage(self) -> str:
        """`train` if the run has this stage, else its first stage."""
        return "train" if "train" in self.series or not self.series else next(iter(self.series))

    def steps(self, stage: str) -> tuple[int, int] | None:
        """Return the first and the last step of a stage; None when the stage has no steps."""
        ends = [x for xs, _ in self.series.get(stage, {}).values() for x in (xs[0], xs[-1])]
        return (min(ends), max(ends)) if ends else None


def load_run(folder: Path) -> Run:
    """Read a run folder. Raise DataError if there is no metrics.jsonl."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError("this folder has no metrics.jsonl", where=str(folder), fix=run_folder_fix(folder))
    series: dict[str, dict[str, dict[int, float | None]]] = {}
    for line in read_jsonl(metrics, needs={"step": int}):
        stage = series.setdefault(str(line.get("stage", "train")), {})
        for name, value in line.items():
            if name not in _NOT_METRICS and (
                value is None or (isinstance(value, (int, float)) and math.isfinite(value))
            ):
                stage.setdefault(name, {})[line["step"]] = value
    info = read_run(folder)
    ordered = {
        stage: {name: _thin(sorted(points.items())) for name, points in metrics.items() if any(
            value is not None for value in points.values())} for stage, metrics in series.items()
    }  # fmt: skip
    return Run(folder, info, ordered)


def distinct_labels(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs, with as much of their paths as equal names need."""
    names = [run.name for run in runs]
    folders = [run.folder.absolute().parts for run in runs]
    for depth in range(max(len(parts) for parts in folders) + 1):
        tails = ["/".join(parts[len(parts) - depth :]) for parts in folders]
        labels = [f"{n} ({t})" if t and names.count(n) > 1 else n for n, t in zip(names, tails, strict=True)]
        if len(set(labels)) == len(runs):
            return labels
    return [f"{number}. {name}" for number, name in enumerate(names, 1)]  # the same folder was given twice


def _thin(points: list[tuple[int, float | None]]) -> Points:
    """Return at most MAX_POINTS points with six digits. Bins are averaged and placed at their last step."""
    size = math.ceil(len(points) / MAX_POINTS)
    x, y = [], []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part if value is not None]
        x.append(part[-1][0])
        y.append(float(f"{sum(values) / len(values):.6g}") if values else None)
    return x, y
