"""report.html: a self-contained page about one run, or about several side by side."""

from __future__ import annotations

import datetime
import html
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import megarl
from megarl.artifacts.profiles import profile_files
from megarl.artifacts.records import set_aside
from megarl.artifacts.trained import exported
from megarl.config.yamlio import flatten
from megarl.system.errors import duration
from megarl.tracking import teams
from megarl.tracking.close import read_restarts
from megarl.tracking.names import number
from megarl.tracking.report_charts import groups, shown
from megarl.tracking.report_runs import (
    Points,
    Run,
    distinct_labels,
    held_out_samples,
    load_run,
    sample_columns,
    training_groups,
)
from megarl.tracking.sample_images import data_uri


@dataclass(frozen=True)
class Tile:
    """A key number at the top of the report.

    `kind`: best value, recent (mean of the last steps), mean (without the first step), or most (the largest value).
    """

    metric: str
    label: str
    kind: str
    unit: str = ""
    better: str = ""


_RECENT = 10  # steps that a recent mean covers
_TILES = (
    Tile("val/acc", "Best validation accuracy", "best", better="up"),
    Tile("rewards/accuracies", "Preferences ranked right", "recent", better="up"),
    Tile("critic/score/mean", "Score", "recent", better="up"),
    Tile("sft/loss", "SFT loss", "recent", better="down"),
    Tile("response_length/mean", "Response length", "recent", "tokens"),
    Tile("perf/throughput", "Throughput per device", "mean", "tokens/s"),
    Tile("timing_s/step", "Step", "mean", "s"),
    Tile("perf/mfu", "MFU", "mean", "%"),
    Tile("perf/max_memory_gb", "Peak memory", "most", "GB"),
)


def report_data(runs: list[Run]) -> dict[str, Any]:
    """Return the data of the report's page. The report is about the first run; others are shown for comparison."""
    for run, label in zip(runs, distinct_labels(runs), strict=True):
        run.label = label
    run = runs[0]
    stage = run.main_stage()
    samples, pictures, note = _all_samples(runs, stage)
    graph = run.folder / "graph.svg"
    return {
        "runs": [{"name": r.label, "status": r.info.get("status", "unknown")} for r in runs],
        "facts": _facts(run, stage),
        "tiles": _tiles(runs, stage),
        "groups": groups(runs),
        "samples": samples,
        "samplesNote": note,
        "pictures": pictures,
        "sampleColumns": sample_columns(samples),
        "training": [{"run": r.label, "rows": rows} for r in runs if (rows := training_groups(r.folder))],
        "differences": _differences(runs),
        "graph": data_uri(graph) if graph.is_file() else None,
        "profiles": [path.as_posix() for path in profile_files(run.folder)],
        "config": _config(run),
        "machine": _machine(run),
    }


def _all_samples(runs: list[Run], stage: str) -> tuple[list[dict[str, Any]], dict[str, str], str]:
    """Return the held-out samples of all runs (with the run's name if there are several), their images, and a note."""
    rows: list[dict[str, Any]] = []
    pictures: dict[str, str] = {}
    notes: list[str] = []
    for run in runs:
        of_run, images, note = held_out_samples(run.folder, stage)
        rows += of_run if len(runs) == 1 else [row | {"run": run.label} for row in of_run]
        pictures |= images
        notes += [note if len(runs) == 1 else f"{run.label}: {note}"] if note else []
    return rows, pictures, "; ".join(notes)


def _differences(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return the configuration keys that differ between runs, with each run's value or a dash if it has none."""
    configs = [
        {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            for name, value in flatten(run.info.get("config", {}))
        }
        for run in runs
    ]
    rows = [(name, [config.get(name, "–") for config in configs]) for name in dict.fromkeys(itertools.chain(*configs))]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _tiles(runs: list[Run], stage: str) -> list[dict[str, Any]]:
    """Return the report's key numbers; each has one entry per run with a value and a note."""
    tiles = []
    for tile in _TILES:
        if tile.metric in runs[0].series.get(stage, {}):
            entries = [_entry(tile, run.series.get(stage, {}).get(tile.metric)) for run in runs]
            line = shown(tile.metric, runs[0].series[stage][tile.metric])[1]
            tiles.append({"label": tile.label, "unit": tile.unit, "runs": entries, "y": line})
    return tiles


def _entry(tile: Tile, points: Points | None) -> dict[str, Any]:
    """Return what a tile, the report's box for a metric, shows: its value (None without the metric) and a note."""
    drawn = ([], []) if points is None else shown(tile.metric, points)
    pairs = [(step, value) for step, value in zip(*drawn, strict=True) if value is not None]
    if not pairs:
        return {"value": None, "note": ""}
    values = [value for _, value in pairs]
    first, last = values[0], values[-1]
    best_step, best = (min if tile.better == "down" else max)(pairs, key=lambda pair: pair[1])
    if tile.kind == "best":
        return {"value": best, "note": f"at step {best_step}; first {number(first, 3)}, last {number(last, 3)}"}
    if tile.kind == "most":
        return {"value": best, "note": f"at step {best_step}"}
    if tile.kind == "recent":
        end = values[-_RECENT:]
        note = f"best {number(best, 3)} at step {best_step}" if tile.better else f"first {number(first, 3)}"
        value = sum(end) / len(end)
        return {"value": value, "note": f"mean of the last {len(end)}; {note}" if len(values) > 1 else ""}
    begun = [value for step, value in pairs if step > 0]
    steady = begun[1:] or values  # the first step includes compilation and allocation
    note = f"mean of {len(steady)} steps; {number(min(steady), 3)} to {number(max(steady), 3)}"
    return {"value": sum(steady) / len(steady), "note": note if len(steady) > 1 else ""}


def _facts(run: Run, stage: str) -> list[tuple[str, str]]:
    info, facts = run.info, []
    if "started" in info:
        facts.append(("started", f"{datetime.datetime.fromtimestamp(info['started']):%Y-%m-%d %H:%M}"))
        if "ended" in info:
            facts.append(("took", duration(info["ended"] - info["started"])))
    if (steps := run.steps(stage)) is not None:
        facts.append(("steps", str(steps[1])))
        bounds = teams.bounding_team(teams.after_start(run.series[stage]))
        facts += [("bounded by", bounds)] if bounds else []
    restarts = read_restarts(run.folder)
    if restarts:
        facts.append(("restarts", f"{len(restarts)}, the last one because {restarts[-1]['why']}"))
    config = info.get("config", {})
    model = config.get("model", {})
    fresh = (model.get("hf_config") or {}).get("model_type")
    for label, value in (
        ("model", model.get("path") or (fresh and f"fresh {fresh}")),
        ("estimator", config.get("algorithm", {}).get("advantage", {}).get("name")),
        ("devices", config.get("cluster", {}).get("nproc")),
    ):
        if value is not None:
            facts.append((label, str(value)))
    models = [f"{model.folder}: {model.which}, step {model.step}" for model in exported(run.folder)]
    if models:
        facts.append(("exported", "; ".join(models)))
    machine = info.get("machine", {})
    device = (machine.get("gpus") or [machine.get("processor")])[0]
    if device:
        facts.append(("on", str(device)))
    return facts


def _config(run: Run) -> str:
    path = run.folder / "config.yaml"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    import yaml

    return yaml.safe_dump(run.info.get("config", {}), sort_keys=False)


def _machine(run: Run) -> list[tuple[str, str]]:
    rows = []
    for name, value in run.info.get("machine", {}).items():
        if isinstance(value, dict):
            rows += [(key, str(item)) for key, item in value.items()]
        elif value:
            rows.append((name.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value)))
    return rows


_SCRIPTS = ("report_charts.js", "report_samples.js", "report.js")


def write_report(run_dir: str | os.PathLike[str], compare: Sequence[str | os.PathLike[str]] = ()) -> Path:
    """Write RUN_DIR/report.html, or compare.html with the curves of further runs, while the run may still be running.
    Raise DataError if a folder has no metrics.jsonl.
    """
    runs = [load_run(Path(folder)) for folder in (run_dir, *compare)]
    page = render(runs[0].name, report_data(runs))
    target = Path(run_dir) / ("compare.html" if compare else "report.html")
    if target.is_dir():
        set_aside(target, "a folder")
    temporary = target.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, target)
    return target


def render(title: str, data: dict[str, Any]) -> str:
    """Return the report as HTML. Users' texts are inserted only as JSON with escaped `<`, and through `textContent`."""
    assets = files("megarl.tracking")
    parts = {
        "TITLE": html.escape(f"{title} · megarl"),
        "VERSION": html.escape(megarl.__version__),
        "DATE": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "CSS": (assets / "report.css").read_text(encoding="utf-8"),
        "JS": "".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "DATA": json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029"),
    }
    page = (assets / "report.html").read_text(encoding="utf-8")
    pieces = page.split("__")
    return "".join(parts.get(piece, piece) if i % 2 else piece for i, piece in enumerate(pieces))
