"""Charts of report.html: which metrics share a chart, their groups and titles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.artifacts.timings import WITHIN_PHASES
from megarl.tracking import teams
from megarl.tracking.report_runs import Points, Run

# a chart whose first metric is one of these is not smoothed, like charts of val/...
_EXACT = ("actor/lr", "sft/lr", "perf/max_memory_gb")
_HERO = ("critic/score/mean", "val/acc")  # charts that are shown large and never folded
_SAME = 1e-5  # a series is constant if its values differ by less than this share
_UNITS = (("timing_s/", "", "seconds"), ("", "_s", "seconds"), ("", "_gb", "GB"), ("", "_tokens", "tokens"),
          ("", "/acc", "share"))  # fmt: skip
_NAMED = ("%", "seconds", "GB", "tokens", "steps", "rounds")  # axis titles that are also written after a value
_PERCENT = frozenset({"perf/mfu"})  # shares that are shown in percent


@dataclass(frozen=True)
class Chart:
    """Metrics that are drawn in one chart; metrics that a run lacks are omitted.

    Attributes:
        lines: (metric, text in the legend); an empty text stands for the last part of the metric's name. `reward/*`
            stands for all metrics whose names begin with `reward/`.
        unit: title of the value axis.
        band: metrics with the lowest and the highest value, drawn as a shaded band.
    """

    title: str
    hint: str
    lines: Sequence[tuple[str, str]]
    unit: str = ""
    band: tuple[str, str] | None = None


def _one(title: str, hint: str, metric: str, unit: str = "", band: tuple[str, str] | None = None) -> Chart:
    return Chart(title, hint, ((metric, ""),), unit, band)


_LEARNING = (
    _one("Score", "mean over samples, shaded: lowest to highest", "critic/score/mean", "score",
         ("critic/score/min", "critic/score/max")),
    _one("Validation accuracy", "held-out prompts", "val/acc", "share"),
    Chart("Preferences ranked right", "share whose chosen response has the larger reward, or agrees with its label",
          (("rewards/accuracies", "training"), ("val/rewards/accuracies", "held out")), "share"),
    Chart("Reward margin", "chosen less rejected",
          (("rewards/margins", "training"), ("val/rewards/margins", "held out")), "reward"),
    Chart("Rewards of responses", "as the policy implies them",
          (("rewards/chosen", "chosen"), ("rewards/rejected", "rejected")), "reward"),
    Chart("Log-probs of responses", "", (("logps/chosen", "chosen"), ("logps/rejected", "rejected")), "nats"),
    Chart("Preference loss", "per pair", (("preference/loss", "training"), ("val/preference/loss", "held out")),
          "loss"),
    Chart("KL of mismatched responses", "the baseline of KTO's rewards, over beta",
          (("preference/kl", "training"), ("val/preference/kl", "held out")), "nats"),
    Chart("Groups without a signal", "share whose samples all scored the same, are all correct, or all wrong",
          (("critic/groups/zero_std", "same score"), ("critic/groups/all_correct", "all correct"),
           ("critic/groups/none_correct", "none correct")), "share"),
    _one("Spread of scores", "standard deviation within a group, mean", "critic/score/group_std", "score"),
    _one("Reward", "score after penalties", "critic/rewards/mean", "reward"),
    _one("Reward parts", "what the reward function returned", "reward/*", "reward"),
)  # fmt: skip
_POLICY = (
    _one("KL to the reference", "how far the policy has moved", "actor/kl_loss", "nats per token"),
    _one("KL of the update", "old policy to new, within a step", "actor/ppo_kl", "nats per token"),
    _one("Entropy", "of the policy where it generated", "actor/entropy", "nats per token"),
    _one("Policy loss", "", "actor/pg_loss", "loss"),
    Chart("Clipped tokens", "share whose ratio left the clip range",
          (("actor/pg_clipfrac", "upper"), ("actor/pg_clipfrac_lower", "lower")), "share"),
    _one("Gradient norm", "before clipping", "actor/grad_norm", "norm"),
    _one("Learning rate", "", "actor/lr", "rate"),
    _one("Value loss", "the critic's", "critic/vf_loss", "loss"),
    _one("Explained variance", "share of the returns' variance that the critic foresaw", "critic/vf_explained_var",
         "share"),
    _one("Generation rounds", "of dynamic sampling, per step", "sampling/rounds", "rounds"),
    _one("Groups with a signal", "share whose scores differ", "sampling/kept", "share"),
)  # fmt: skip
_GAP = (
    Chart("KL of generation and training", "k3 is never negative",
          (("rollout_corr/k3_kl", "k3"), ("rollout_corr/kl", "direct")), "nats per token"),
    _one("Ratio", "trainer to rollout, shaded: smallest to largest", "rollout_corr/ratio_mean", "ratio",
         ("rollout_corr/ratio_min", "rollout_corr/ratio_max")),
    Chart("Effective sample size", "share of the tokens, or of the weighted samples",
          (("rollout_corr/ess", "tokens"), ("rollout_corr/is_ess", "weights")), "share"),
    Chart("Rejected tokens", "share, all rules and each by itself",
          (("rollout_corr/rejected", "all"), ("rollout_corr/rejected/*", "")), "share"),
    _one("Age of the weights", "that generated a token", "rollout_corr/staleness_mean", "steps"),
    _one("Tokens by age", "share of the tokens, by the age of their weights in steps", "rollout_corr/staleness/*",
         "share"),
)  # fmt: skip
_LENGTHS = (
    _one("Response length", "shaded: shortest to longest", "response_length/mean", "tokens",
         ("response_length/min", "response_length/max")),
    _one("Cut responses", "share that hit the length limit", "response_length/clip_ratio", "share"),
    _one("Prompt length", "", "prompt_length/mean", "tokens"),
)  # fmt: skip
_SPEED = (
    _one("Throughput", "prompt and response tokens", "perf/throughput", "tokens per second and device"),
    _one("Model FLOPs utilisation", "of the device's peak", "perf/mfu", "%"),
    _one("Peak memory", "of the fullest device", "perf/max_memory_gb", "GB"),
    _one("Busy teams", "part of a step in which a team does not wait for others", "team/*/busy", "share"),
    _one("Tokens of a team", "prompt and response tokens of the samples that it works on", "team/*/tokens_per_s",
         "tokens per second"),
)  # fmt: skip
_SFT = (
    Chart("Loss", "", (("sft/loss", "examples"), ("val/loss", "held out")), "loss per response token"),
    _one("Validation accuracy", "held-out prompts", "val/acc", "share"),
    Chart("Gradient norm", "before clipping", (("actor/grad_norm", ""), ("sft/grad_norm", "sft")), "norm"),
    Chart("Learning rate", "", (("actor/lr", ""), ("sft/lr", "sft")), "rate"),
)


def groups(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the groups of charts of all stages, each with an id, a long and a short title, charts and constants."""
    result = []
    stages = list(dict.fromkeys(stage for run in runs for stage in run.series))
    for stage in sorted(stages, key=lambda s: (s != "train", s)):
        used: set[str] = set()
        train, name = stage == "train", "supervised start" if stage == "sft" else stage
        plan: list[tuple[str, str, Sequence[Chart]]] = [
            ("Learning", "Learning", (*_LEARNING, *_votes(runs, stage))),
            ("Policy", "Policy", _POLICY),
            ("Generation and training", "Gap", _GAP),
            ("Lengths", "Lengths", _LENGTHS),
        ]
        for title, short, rows in plan if train else [(name.capitalize(), "", _SFT)]:
            result.append(_group(title, short, stage, _line_charts(runs, stage, rows, used)))
        speed = _phase_charts(runs, stage, used) + _team_charts(runs, stage, used)
        speed += _line_charts(runs, stage, (*_SPEED, *_of_teams(runs, stage)), used)
        result.append(_group("Speed" if train else f"Speed ({name})", "Speed", stage, speed))
        names = sorted({name for run in runs for name in run.series.get(stage, {})} - used)
        rest = _line_charts(runs, stage, [_one(metric, "", metric, unit_of(metric)) for metric in names], used)
        title = "Everything else" if train else f"Everything else ({name})"
        result.append(_group(title, "Other", stage, rest) | {"folded": True, "note": "metrics without a place above"})
    return [group for group in result if group["charts"] or group["constants"]]


def _group(title: str, short: str, stage: str, charts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a group of charts. Charts that contain only constant lines are replaced by a list of their values."""
    constants = [chart for chart in charts if _is_constant(chart)]
    drawn = stage if stage != "train" else ""
    return {
        "id": "-".join([*title.lower().replace("(", "").replace(")", "").split(), drawn]).strip("-"),
        "title": title,
        "short": f"{stage.upper()} {short.lower()}".strip() if drawn else short,
        "note": "",
        "charts": [chart for chart in charts if chart not in constants],
        "constants": [[chart["title"], _values(chart)] for chart in constants],
    }


def _is_constant(chart: dict[str, Any]) -> bool:
    """Return whether each line of a chart stays at one value for several steps, so that the chart can be left out."""
    if chart["kind"] != "line" or chart.get("hero") or "band" in chart:
        return False
    return all(len(line["y"]) > 1 and one_value(line["y"]) and "start" not in line for line in chart["lines"])


def one_value(values: Sequence[float | None]) -> bool:
    """Return whether all values are equal except for rounding, and none is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return False
    return max(known) - min(known) <= _SAME * max(map(abs, known))


def _values(chart: dict[str, Any]) -> str:
    lines, unit = chart["lines"], chart["unit"]
    values = dict.fromkeys(line["y"][-1] for line in lines)
    if len(values) == 1:
        return f"{next(iter(values)):.4g} {unit if unit in _NAMED else ''}".strip()
    return ", ".join(f"{line['label']}: {line['y'][-1]:.4g}" for line in lines)


def unit_of(metric: str) -> str:
    """Return the axis title of a metric that is in none of the charts defined here, derived from its name.

    >>> [unit_of(name) for name in ("timing_s/load", "perf/resident_gb", "my/own")]
    ['seconds', 'GB', 'value']
    """
    fitting = (unit for begin, end, unit in _UNITS if metric.startswith(begin) and metric.endswith(end))
    return next(fitting, "value")


def _votes(runs: list[Run], stage: str) -> list[Chart]:
    """Return a chart with best@n, maj@n, worst@n for the largest logged n; an empty list without any."""
    names = {name for run in runs for name in run.series.get(stage, {}) if name.startswith("val/best@")}
    if not names:
        return []
    n = max(int(name.split("@")[1]) for name in names)
    lines = [(f"val/{kind}@{n}", f"{kind}@{n}") for kind in ("best", "maj", "worst")]
    return [Chart(f"Validation with {n} samples", "per prompt", lines, "share")]


def _line_charts(runs: list[Run], stage: str, rows: Sequence[Chart], used: set[str]) -> list[dict[str, Any]]:
    return [chart for row in rows if (chart := _line_chart(runs, stage, row, used))]


def _line_chart(runs: list[Run], stage: str, row: Chart, used: set[str]) -> dict[str, Any] | None:
    """Return a chart of the metrics of `row`; colours distinguish runs if there are several, else metrics."""
    lines = []
    for r, run in enumerate(runs):
        have = run.series.get(stage, {})
        for m, (name, label) in enumerate(_expand(row.lines, have)):
            if name not in have:
                continue
            used.add(name)
            text = label or name.rsplit("/", 1)[-1]
            if len(runs) > 1:
                text = f"{run.label} {label}".strip()
            dash = ("", "5 3", "2 3")[m % 3] if len(runs) > 1 else ""
            x, y = shown(name, have[name])
            line = {"label": text, "x": x, "y": y, "tint": r if len(runs) > 1 else m, "dash": dash}
            # the supervised phase measured the metric before the first RL step
            before = run.series.get("sft", {}).get(name)
            if stage == "train" and before is not None and name.startswith("val/"):
                line["start"] = {"x": before[0], "y": before[1]}
            lines.append(line)
    if not lines:
        return None
    first = row.lines[0][0]
    chart: dict[str, Any] = {"kind": "line", "stage": stage, "title": row.title, "hint": row.hint, "unit": row.unit,
                             "lines": lines, "range": _range(runs, stage)}  # fmt: skip
    chart["exact"] = first in _EXACT or first.startswith("val/")
    if stage == "train" and first in _HERO:
        chart |= {"hero": True, "height": 270}
    have = runs[0].series.get(stage, {})
    if row.band and all(name in have for name in row.band):
        used.update(row.band)
        (x, low), (_, high) = have[row.band[0]], have[row.band[1]]
        if len(runs) == 1 and not (one_value(low) and one_value(high)):
            return chart | {"band": {"x": x, "lo": low, "hi": high}}
    return chart | {"hint": row.hint.split("shaded")[0].rstrip(", ")}


def shown(name: str, points: Points) -> Points:
    """Return the points of a metric as the report draws them: for the shares in `_PERCENT` in percent."""
    x, y = points
    return (x, [value and 100 * value for value in y]) if name in _PERCENT else points


def _expand(wanted: Sequence[tuple[str, str]], have: dict[str, Points]) -> list[tuple[str, str]]:
    """Replace patterns such as `reward/*` and `team/*/busy` by the metrics `have` that match, each with a label.

    A pattern with only one match is dropped: a single part of the reward equals the score.
    """
    names = []
    for name, label in wanted:
        before, star, after = name.partition("*")
        if star:
            fitting = [n for n in sorted(have) if n.startswith(before) and n.endswith(after) and n != "reward/errors"]
            labels = [n.removesuffix(after).rsplit("/", 1)[-1] for n in fitting]
            names += list(zip(fitting, labels, strict=True)) if len(fitting) > 1 else []
        else:
            names.append((name, label))
    return names


def _range(runs: list[Run], stage: str) -> list[int]:
    ends = [steps for run in runs if (steps := run.steps(stage))]
    return [min(first for first, _ in ends), max(last for _, last in ends)]


def _phase_charts(runs: list[Run], stage: str, used: set[str]) -> list[dict[str, Any]]:
    """Return charts of the stacked seconds of a step's phases, one per run."""
    charts = []
    for run in runs:
        have = run.series.get(stage, {})
        timings = {
            short: points
            for name, points in have.items()
            if name.startswith("timing_s/") and (short := name.removeprefix("timing_s/")) not in WITHIN_PHASES
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
        charts.append({"kind": "stack", "stage": stage, "title": title, "hint": "wall time of each step, by phase",
                       "unit": "seconds", "wide": True, "height": 240, "x": x, "lines": stack,
                       "range": _range(runs, stage)})  # fmt: skip
    return charts


def _team_charts(runs: list[Run], stage: str, used: set[str]) -> list[dict[str, Any]]:
    """Return charts of the work and waits of every team in a step, one per run with several teams."""
    charts = []
    for run in runs:
        have = run.series.get(stage, {})
        values = teams.after_start(have)
        waits = teams.waits(values)
        if len(waits) < 2:
            continue
        used.update(teams.shown_as_waits(have))
        title = "Who waited for whom" + (f": {run.label}" if len(runs) > 1 else "")
        hint = "strong: working, pale: waiting for the team of that colour; means over ranks and steps"
        bounds = teams.bounding_team(values)
        charts.append({"kind": "waits", "stage": stage, "title": title, "hint": hint, "unit": "seconds of a step",
                       "wide": True, "teams": waits, "bounds": bounds})  # fmt: skip
    return charts


def _of_teams(runs: list[Run], stage: str) -> list[Chart]:
    names = {name for run in runs for name in run.series.get(stage, {})}
    rows = [
        Chart("What teams waited for", "in a step", teams.lines_of_waits(names), "seconds"),
        Chart("Queues of the buffer", "waiting at the end of a step", teams.lines_of_queues(names), "groups"),
    ]
    return [row for row in rows if row.lines]
