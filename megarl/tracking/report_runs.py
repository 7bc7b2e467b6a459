"""Run folders as report.html shows them: each metric as a series of points, and tables of samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import read_jsonl
from megarl.artifacts.records import read_run
from megarl.artifacts.trained import run_folder_fix
from megarl.system.errors import DataError
from megarl.tracking.sample_images import data_uri, embedded

MAX_POINTS = 1500  # maximum number of points per line; more are averaged in bins
MAX_SAMPLE_STEPS = 12
MAX_SAMPLES_PER_STEP = 40
MAX_TEXT = 4000
MAX_GROUP_STEPS = 8
_MAX_GROUP_ROWS = 64  # maximum number of rows in the table of prompt groups, per step
_OF_TOKENS = ("pieces", "advantages", "ratios", "ages")
_FILM_BYTES = 8 << 20  # largest total size of a run's films in a report, in bytes; others stay in the run folder
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
        """The run's name; without run.json, the folder's name."""
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
    """Return the names of the runs; equal names get as much of their paths as needed to differ."""
    names = [run.name for run in runs]
    folders = [run.folder.absolute().parts for run in runs]
    for depth in range(max(len(parts) for parts in folders) + 1):
        tails = ["/".join(parts[len(parts) - depth :]) for parts in folders]
        labels = [f"{n} ({t})" if t and names.count(n) > 1 else n for n, t in zip(names, tails, strict=True)]
        if len(set(labels)) == len(runs):
            return labels
    return [f"{number}. {name}" for number, name in enumerate(names, 1)]  # the same folder was given twice


def _thin(points: list[tuple[int, float | None]]) -> Points:
    """Return at most MAX_POINTS points with six digits. Neighbouring points are averaged, at their last step."""
    size = math.ceil(len(points) / MAX_POINTS)
    x, y = [], []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part if value is not None]
        x.append(part[-1][0])
        y.append(float(f"{sum(values) / len(values):.6g}") if values else None)
    return x, y


def held_out_samples(folder: Path, stage: str) -> tuple[list[dict[str, Any]], dict[str, str], str]:
    """Return rows of held-out samples for the table, images by name, and a note on omissions. With many steps, evenly
    spaced ones are shown.
    """
    rows = [
        row for row in read_jsonl(folder / "samples.jsonl", needs={"step": int}) if row.get("stage", stage) == stage
    ]
    shown = []
    for step in _some_steps(rows, MAX_SAMPLE_STEPS):
        shown += [row for row in rows if row["step"] == step][:MAX_SAMPLES_PER_STEP]
    notes = [f"{len(shown)} of {len(rows)} samples; samples.jsonl has all"] if len(shown) < len(rows) else []
    films, (pictures, images) = _embed_films(folder, shown), embedded(folder, shown)
    text = "this page; the column {} names their files in the run folder"
    notes += [f"{films} films are too large for {text.format('video')}"] if films else []
    notes += [f"{images} images do not fit into {text.format('images')}"] if images else []
    as_they_are = ("film", "images")
    cells = [{key: value if key in as_they_are else _cell(value) for key, value in row.items()} for row in shown]
    return cells, pictures, "; ".join(notes)


def training_groups(folder: Path) -> list[dict[str, Any]]:
    """Return the training samples kept by the run (`megarl.runtime.training_samples`), of evenly spaced steps."""
    rows = read_jsonl(folder / "training_samples.jsonl", needs={"step": int, "pieces": list})
    groups = []
    for step in _some_steps(rows, MAX_GROUP_STEPS):
        for row in [row for row in rows if row["step"] == step][:_MAX_GROUP_ROWS]:
            of_tokens = {name: row[name] for name in _OF_TOKENS if isinstance(row.get(name), list)}
            groups.append({key: of_tokens.get(key) or _cell(value) for key, value in row.items()})
    return groups


def _some_steps(rows: list[dict[str, Any]], most: int) -> list[int]:
    """Return at most `most` steps of the rows: the first, the last, and evenly spaced steps between them."""
    steps = sorted({row["step"] for row in rows})
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _embed_films(folder: Path, rows: list[dict[str, Any]]) -> int:
    """Put films into their rows as data URIs in `film`, latest steps first; return the number of omitted films."""
    left, without = _FILM_BYTES, 0
    for row in sorted(rows, key=lambda row: row["step"], reverse=True):
        row.pop("film", None)  # a `film` in samples.jsonl is untrusted and not shown
        path = _film(folder, row.get("video"))
        if path is None:
            continue
        size = path.stat().st_size
        if size > left:
            without += 1
            continue
        left -= size
        row["film"] = data_uri(path)
    return without


def _film(folder: Path, name: Any) -> Path | None:
    """Return the file of a film, or None if `name` is not a path inside `folder`."""
    if not isinstance(name, str):
        return None
    path = (folder / name).resolve()
    return path if path.suffix == ".png" and folder.resolve() in path.parents and path.is_file() else None


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, (int, float)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."


def sample_columns(rows: list[dict[str, Any]]) -> list[str]:
    """Return the columns of the table of samples: known columns first, then all others in the rows."""
    first = ["film", "images", "prompt", "response", "answer", "score"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [n for n in first if n in names] + [
        n for n in names if n not in (*first, "step", "stage", "run", "uid", "sample_id")
    ]
