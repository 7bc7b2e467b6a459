"""report.html: one self-contained page about a run, or about several side by side."""

from __future__ import annotations

import base64
import datetime
import html
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import megarl
from megarl.artifacts.jsonl import read_jsonl
from megarl.artifacts.records import read_run, set_aside
from megarl.artifacts.trained import exported, run_folder_fix
from megarl.errors import DataError
from megarl.tracking import teams
from megarl.tracking.restarts import read_restarts
from megarl.tracking.sample_images import embedded

MAX_POINTS = 1500  # per line; more are averaged in bins
MAX_SAMPLE_STEPS = 12
_FILM_BYTES = 8 << 20  # total size of films in a report; others stay in the run folder
MAX_SAMPLES_PER_STEP = 40
MAX_TEXT = 4000
_EXACT = ("actor/lr", "sft/lr", "perf/max_memory_gb")  # not smoothed, as in val/...: each round stands by itself
_HERO = ("critic/score/mean", "val/acc")  # charts shown large
_NOT_METRICS = ("step", "stage", "time")

# (title, hint, [(metric, legend)], (lowest, highest) or None); charts without data are left out.
_Chart = tuple[str, str, list[tuple[str, str]], tuple[str, str] | None]
_LEARNING: list[_Chart] = [
    ("Score", "mean over samples, shaded: lowest to highest", [("critic/score/mean", "")],
     ("critic/score/min", "critic/score/max")),
    ("Validation accuracy", "held-out prompts", [("val/acc", "")], None),
    ("Pairs ranked right", "share whose chosen response has the larger reward",
     [("rewards/accuracies", "training"), ("val/rewards/accuracies", "held out")], None),
    ("Reward margin", "chosen less rejected", [("rewards/margins", "training"), ("val/rewards/margins", "held out")],
     None),
    ("Rewards of responses", "as the policy implies them", [("rewards/chosen", "chosen"),
     ("rewards/rejected", "rejected")], None),
    ("Log-probs of responses", "", [("logps/chosen", "chosen"), ("logps/rejected", "rejected")], None),
    ("Preference loss", "per pair", [("preference/loss", "training"), ("val/preference/loss", "held out")], None),
    ("Reward", "score after penalties", [("critic/rewards/mean", "")], None),
    ("Reward parts", "what the reward function returned", [("reward/*", "")], None),
]  # fmt: skip
_POLICY: list[_Chart] = [
    ("KL to the reference", "how far the policy has moved", [("actor/kl_loss", "")], None),
    ("KL of the update", "old policy to new, within a step", [("actor/ppo_kl", "")], None),
    ("Entropy", "per response token, in nats", [("actor/entropy", "")], None),
    ("Policy loss", "", [("actor/pg_loss", "")], None),
    ("Clipped tokens", "share whose ratio left the clip range",
     [("actor/pg_clipfrac", "upper"), ("actor/pg_clipfrac_lower", "lower")], None),
    ("Gradient norm", "before clipping", [("actor/grad_norm", "")], None),
    ("Learning rate", "", [("actor/lr", "")], None),
    ("Value loss", "the critic's", [("critic/vf_loss", "")], None),
    ("Explained variance", "share of the returns' variance that the critic foresaw", [("critic/vf_explained_var", "")],
     None),
    ("Generation rounds", "of dynamic sampling, per step", [("sampling/rounds", "")], None),
    ("Groups with a signal", "share whose scores differ", [("sampling/kept", "")], None),
]  # fmt: skip
_GAP: list[_Chart] = [
    ("KL of generation and training", "per token, k3 is never negative",
     [("rollout_corr/k3_kl", "k3"), ("rollout_corr/kl", "direct")], None),
    ("Ratio", "trainer to rollout, shaded: smallest to largest", [("rollout_corr/ratio_mean", "")],
     ("rollout_corr/ratio_min", "rollout_corr/ratio_max")),
    ("Effective sample size", "share of the tokens, or of the weighted samples",
     [("rollout_corr/ess", "tokens"), ("rollout_corr/is_ess", "weights")], None),
    ("Rejected tokens", "share, all rules and each by itself",
     [("rollout_corr/rejected", "all"), ("rollout_corr/rejected/*", "")], None),
    ("Age of the weights", "steps, per token", [("rollout_corr/staleness_mean", "")], None),
    ("Tokens by age", "share of the tokens, by the age of their weights in steps",
     [("rollout_corr/staleness/*", "")], None),
]  # fmt: skip
_LENGTHS: list[_Chart] = [
    ("Response length", "tokens, shaded: shortest to longest", [("response_length/mean", "")],
     ("response_length/min", "response_length/max")),
    ("Cut responses", "share that hit the length limit", [("response_length/clip_ratio", "")], None),
    ("Prompt length", "tokens", [("prompt_length/mean", "")], None),
]  # fmt: skip
_SPEED: list[_Chart] = [
    ("Throughput", "prompt and response tokens per second and device", [("perf/throughput", "")], None),
    ("Model FLOPs utilisation", "share of the device's peak", [("perf/mfu", "")], None),
    ("Peak memory", "GB per device", [("perf/max_memory_gb", "")], None),
    ("Busy teams", "share of a step in which a team does not wait for others", [("team/*/busy", "")], None),
    ("Tokens of a team", "prompt and response tokens per second of the samples that it works on",
     [("team/*/tokens_per_s", "")], None),
]  # fmt: skip
_SFT: list[_Chart] = [
    ("Loss", "per response token", [("sft/loss", "")], None),
    ("Validation accuracy", "held-out prompts", [("val/acc", "")], None),
    ("Gradient norm", "before clipping", [("actor/grad_norm", ""), ("sft/grad_norm", "sft")], None),
    ("Learning rate", "", [("actor/lr", ""), ("sft/lr", "sft")], None),
]
_TILES = (
    ("val/acc", "Validation accuracy", "", "up"),
    ("critic/score/mean", "Score", "", "up"),
    ("sft/loss", "SFT loss", "", "down"),
    ("response_length/mean", "Response length", "tokens", None),
    ("perf/throughput", "Throughput", "tok/s", None),
    ("timing_s/step", "Step", "s", None),
    ("perf/mfu", "MFU", "", None),
    ("perf/max_memory_gb", "Peak memory", "GB", None),
)
Points = tuple[list[int], list[float | None]]


@dataclass
class Run:
    """One run folder: run.json, and for each stage and metric its points in order of steps.

    `label` distinguishes it from other runs of a page; empty until there is one.
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
        """Return `train` when there is such a stage, else the first one."""
        return "train" if "train" in self.series or not self.series else next(iter(self.series))


def load_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        DataError: there is no metrics.jsonl.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError("no metrics.jsonl here", where=str(folder), fix=run_folder_fix(folder))
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


def report_data(runs: list[Run]) -> dict[str, Any]:
    """Return the page's data; the first run is the subject, the others are plotted with it for comparison."""
    for run, label in zip(runs, _labels(runs), strict=True):
        run.label = label
    run = runs[0]
    stage = run.main_stage()
    samples, pictures, note = _samples(run.folder, stage)
    return {
        "runs": [{"name": r.label, "status": r.info.get("status", "unknown")} for r in runs],
        "facts": _facts(run, stage),
        "tiles": _tiles(runs, stage),
        "groups": _groups(runs),
        "samples": samples,
        "samplesNote": note,
        "pictures": pictures,
        "sampleColumns": _sample_columns(samples),
        "graph": _graph(run.folder),
        "config": _config(run),
        "machine": _machine(run),
    }


def _labels(runs: list[Run]) -> list[str]:
    """Return the names of the runs, with as much of their folders as it takes to distinguish equal names."""
    names = [run.name for run in runs]
    folders = [run.folder.absolute().parts for run in runs]
    for depth in range(max(len(parts) for parts in folders) + 1):
        tails = ["/".join(parts[len(parts) - depth :]) for parts in folders]
        labels = [f"{n} ({t})" if t and names.count(n) > 1 else n for n, t in zip(names, tails, strict=True)]
        if len(set(labels)) == len(runs):
            return labels
    return [f"{number}. {name}" for number, name in enumerate(names, 1)]  # the same folder, named twice


def _groups(runs: list[Run]) -> list[dict[str, Any]]:
    stages = list(dict.fromkeys(stage for run in runs for stage in run.series))
    groups = []
    for stage in sorted(stages, key=lambda s: (s != "train", s)):
        used: set[str] = set()
        tag = "" if stage == "train" else stage
        plan = [
            ("Learning", _LEARNING + _votes(runs, stage)),
            ("Policy", _POLICY),
            ("Generation and training", _GAP),
            ("Lengths", _LENGTHS),
        ]
        plan = plan if stage == "train" else [("Supervised fine-tuning" if stage == "sft" else stage, _SFT)]
        for title, table in plan:
            charts = [chart for row in table if (chart := _line_chart(runs, stage, row, used))]
            groups.append(_group(title, tag, charts))
        speed = _phase_charts(runs, stage, used) + _team_charts(runs, stage, used)
        table = _SPEED + _of_teams(runs, stage)
        speed += [chart for row in table if (chart := _line_chart(runs, stage, row, used))]
        groups.append(_group("Speed" if stage == "train" else f"Speed ({stage})", tag, speed))
        names = sorted({name for run in runs for name in run.series.get(stage, {})} - used)
        rest = [chart for name in names if (chart := _line_chart(runs, stage, (name, "", [(name, "")], None), used))]
        title = "Everything else" if stage == "train" else f"Everything else ({stage})"
        groups.append(_group(title, tag, rest) | {"folded": True, "note": "metrics without a place above"})
    return [group for group in groups if group["charts"]]


def _group(title: str, tag: str, charts: list[dict[str, Any]]) -> dict[str, Any]:
    slug = "-".join(title.lower().split())
    return {"id": f"{slug}-{tag}".strip("-"), "title": title, "note": "", "charts": charts}


def _votes(runs: list[Run], stage: str) -> list[_Chart]:
    """Return one chart with best@n, maj@n, worst@n of the largest n that was logged."""
    names = {name for run in runs for name in run.series.get(stage, {}) if name.startswith("val/best@")}
    if not names:
        return []
    n = max(int(name.split("@")[1]) for name in names)
    lines = [(f"val/{kind}@{n}", f"{kind}@{n}") for kind in ("best", "maj", "worst")]
    return [(f"Validation with {n} samples", "per prompt", lines, None)]


def _line_chart(runs: list[Run], stage: str, row: _Chart, used: set[str]) -> dict[str, Any] | None:
    """Return a chart of the metrics of `row` over all runs; colours distinguish several runs, else metrics."""
    title, hint, wanted, band = row
    lines = []
    for r, run in enumerate(runs):
        have = run.series.get(stage, {})
        for m, (name, label) in enumerate(_expand(wanted, have)):
            if name not in have:
                continue
            used.add(name)
            x, y = have[name]
            text = label or name.rsplit("/", 1)[-1]
            if len(runs) > 1:
                text = f"{run.label} {label}".strip()
            dash = ("", "5 3", "2 3")[m % 3] if len(runs) > 1 else ""
            lines.append({"label": text, "x": x, "y": y, "tint": r if len(runs) > 1 else m, "dash": dash})
    if not lines:
        return None
    chart: dict[str, Any] = {
        "kind": "line",
        "stage": stage,
        "title": title,
        "hint": hint,
        "lines": lines,
        "range": _range(runs, stage),
    }
    chart["exact"] = wanted[0][0] in _EXACT or wanted[0][0].startswith("val/")
    if stage == "train" and wanted[0][0] in _HERO:
        chart |= {"hero": True, "height": 260}
    have = runs[0].series.get(stage, {})
    if band and all(name in have for name in band):
        used.update(band)
        (x, low), (_, high) = have[band[0]], have[band[1]]
        if len(runs) == 1 and (len(set(low)) > 1 or len(set(high)) > 1):
            chart["band"] = {"x": x, "lo": low, "hi": high}
        else:
            chart["hint"] = hint.split(", shaded")[0]
    return chart


def _expand(wanted: list[tuple[str, str]], have: dict[str, Points]) -> list[tuple[str, str]]:
    """Expand `reward/*` and `team/*/busy` to all metrics of that form; a single part would only repeat the score."""
    names = []
    for name, label in wanted:
        before, star, after = name.partition("*")
        if star:
            found = [n for n in sorted(have) if n.startswith(before) and n.endswith(after) and n != "reward/errors"]
            labels = [n.removesuffix(after).rsplit("/", 1)[-1] for n in found]
            names += list(zip(found, labels, strict=True)) if len(found) > 1 else []
        else:
            names.append((name, label))
    return names


def _range(runs: list[Run], stage: str) -> list[int]:
    steps = [x for run in runs for xs, _ in run.series.get(stage, {}).values() for x in (xs[0], xs[-1])]
    return [min(steps), max(steps)]


def _phase_charts(runs: list[Run], stage: str, used: set[str]) -> list[dict[str, Any]]:
    """Return the stacked seconds of the phases of a step, one chart per run."""
    charts = []
    for run in runs:
        have = run.series.get(stage, {})
        timings = {
            name.removeprefix("timing_s/"): points for name, points in have.items() if name.startswith("timing_s/")
        }
        used.update(f"timing_s/{name}" for name in timings)
        inner = [name for name in timings if name.startswith("step/") and name.count("/") == 1]
        parts = inner or [name for name in timings if "/" not in name and name != "step"]
        if not parts:
            continue
        x = sorted({step for name in parts for step in timings[name][0]})
        columns = {name: dict(zip(*timings[name], strict=True)) for name in parts}
        parts.sort(key=lambda name: -sum(value or 0 for value in columns[name].values()))
        stack = [
            {"label": name.removeprefix("step/"), "tint": i, "y": [columns[name].get(step) or 0.0 for step in x]}
            for i, name in enumerate(parts[:7])
        ]
        if len(parts) > 7:
            rest = [sum(columns[name].get(step) or 0.0 for name in parts[7:]) for step in x]
            stack.append({"label": "other", "tint": 7, "y": rest})
        title = "Seconds per phase" + (f": {run.label}" if len(runs) > 1 else "")
        charts.append({"kind": "stack", "stage": stage, "title": title, "hint": "wall seconds of each step by phase",
                       "wide": True, "height": 230, "x": x, "parts": stack})  # fmt: skip
    return charts


def _team_charts(runs: list[Run], stage: str, used: set[str]) -> list[dict[str, Any]]:
    """Return work and waits of every team in a step, one chart per run with several teams."""
    charts = []
    for run in runs:
        have = run.series.get(stage, {})
        values = teams.after_start(have)
        found = teams.waits(values)
        if len(found) < 2:
            continue
        used.update(teams.shown_as_waits(have))
        title = "Who waited for whom" + (f": {run.label}" if len(runs) > 1 else "")
        hint = "seconds of a step; strong: at work, pale: waiting for the team of that colour; means of ranks and steps"
        bounds = teams.bounding_team(values)
        charts.append({"kind": "waits", "stage": stage, "title": title, "hint": hint, "wide": True, "teams": found,
                       "bounds": bounds})  # fmt: skip
    return charts


def _of_teams(runs: list[Run], stage: str) -> list[_Chart]:
    """Return the charts with one line per pair of teams."""
    names = {name for run in runs for name in run.series.get(stage, {})}
    rows: list[_Chart] = [
        ("What teams waited for", "seconds of a step", teams.lines_of_waits(names), None),
        ("Queues of the store", "groups that wait at the end of a step", teams.lines_of_queues(names), None),
    ]
    return [row for row in rows if row[2]]


def _thin(points: list[tuple[int, float | None]]) -> Points:
    """Return at most MAX_POINTS points with six digits; bins are averaged and placed at their last step."""
    size = math.ceil(len(points) / MAX_POINTS)
    x, y = [], []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part if value is not None]
        x.append(part[-1][0])
        y.append(float(f"{sum(values) / len(values):.6g}") if values else None)
    return x, y


def _tiles(runs: list[Run], stage: str) -> list[dict[str, Any]]:
    """Return the key numbers of the first run, and the last values of the others."""
    tiles = []
    have = runs[0].series.get(stage, {})
    for name, label, unit, better in _TILES:
        if name in have:
            values = [value for value in have[name][1] if value is not None]
            tile = {"label": label, "unit": unit, "better": better, "first": values[0], "last": values[-1], "y": values}
            tiles.append(tile | {"others": [_last(run, stage, name) for run in runs[1:]]})
    return tiles


def _last(run: Run, stage: str, name: str) -> float | None:
    """Return the last value of a metric; None when the run has none."""
    values = [value for value in run.series.get(stage, {}).get(name, ([], []))[1] if value is not None]
    return values[-1] if values else None


def _facts(run: Run, stage: str) -> list[tuple[str, str]]:
    info, facts = run.info, []
    if "started" in info:
        facts.append(("started", f"{datetime.datetime.fromtimestamp(info['started']):%Y-%m-%d %H:%M}"))
        if "ended" in info:
            facts.append(("took", _duration(info["ended"] - info["started"])))
    if run.series.get(stage):
        facts.append(("steps", str(_range([run], stage)[1])))
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


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _samples(folder: Path, stage: str) -> tuple[list[dict[str, Any]], dict[str, str], str]:
    """Return rows for the table, pictures by name, and a note on omissions: all steps if they are few, else evenly
    spaced ones."""
    rows = [
        row for row in read_jsonl(folder / "samples.jsonl", needs={"step": int}) if row.get("stage", stage) == stage
    ]
    steps = sorted({row["step"] for row in rows})
    kept = steps
    if len(steps) > MAX_SAMPLE_STEPS:
        kept = [steps[round(i * (len(steps) - 1) / (MAX_SAMPLE_STEPS - 1))] for i in range(MAX_SAMPLE_STEPS)]
    shown = []
    for step in kept:
        shown += [row for row in rows if row["step"] == step][:MAX_SAMPLES_PER_STEP]
    notes = [f"{len(shown)} of {len(rows)}; all are in samples.jsonl"] if len(shown) < len(rows) else []
    if without := _embed_films(folder, shown):
        notes.append(f"{without} films are too large for this page; they are in the run's folder, see video")
    pictures, missing = embedded(folder, shown)
    if missing:
        notes.append(f"{missing} images do not fit into this page; they are in the run's folder, see images")
    own = ("film", "images")
    found = [{key: value if key in own else _cell(value) for key, value in row.items()} for row in shown]
    return found, pictures, "; ".join(notes)


def _embed_films(folder: Path, rows: list[dict[str, Any]]) -> int:
    """Put films into their rows as data URIs, `film`, latest steps first; return the number of omitted films."""
    left, without = _FILM_BYTES, 0
    for row in sorted(rows, key=lambda row: row["step"], reverse=True):
        row.pop("film", None)  # text of other origin is not shown as a picture
        path = _film(folder, row.get("video"))
        if path is None:
            continue
        size = path.stat().st_size
        if size > left:
            without += 1
            continue
        left -= size
        row["film"] = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return without


def _film(folder: Path, name: Any) -> Path | None:
    """Return the file of a film, if `name` is one inside of `folder`."""
    if not isinstance(name, str):
        return None
    path = (folder / name).resolve()
    return path if path.suffix == ".png" and folder.resolve() in path.parents and path.is_file() else None


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, (int, float)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."


def _sample_columns(rows: list[dict[str, Any]]) -> list[str]:
    first = ["film", "images", "prompt", "response", "answer", "score"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [n for n in first if n in names] + [
        n for n in names if n not in (*first, "step", "stage", "uid", "sample_id")
    ]


def _graph(folder: Path) -> str | None:
    """Return the task graph as a data URI: inside <img> a drawing cannot run scripts."""
    path = folder / "graph.svg"
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}" if path.is_file() else None


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


def write_report(run_dir: str | os.PathLike[str], compare: Sequence[str | os.PathLike[str]] = ()) -> Path:
    """Write RUN_DIR/report.html from the current files of the run folder; the run may still be going.

    Args:
        run_dir: run folder with metrics.jsonl.
        compare: more run folders whose curves are plotted with it; the page is then `compare.html`.

    Raises:
        DataError: a folder has no metrics.jsonl.
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
    """Return the page. Text of users reaches it as JSON whose `<` are escaped, and through `textContent` only."""
    assets = files("megarl.tracking")
    parts = {
        "TITLE": html.escape(f"{title} · megarl"),
        "VERSION": html.escape(megarl.__version__),
        "DATE": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "CSS": (assets / "report.css").read_text(encoding="utf-8"),
        "JS": (assets / "report.js").read_text(encoding="utf-8"),
        "DATA": _script_safe(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
    }
    page = (assets / "report.html").read_text(encoding="utf-8")
    pieces = page.split("__")
    return "".join(parts.get(piece, piece) if i % 2 else piece for i, piece in enumerate(pieces))


def _script_safe(text: str) -> str:
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
