"""The history of `megarl bench --compare` as one HTML page that needs no network."""

from __future__ import annotations

import html
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.benchmarks.matrix import Cell
from megarl.benchmarks.matrix_view import JudgedLines, matrix_html, published_html
from megarl.benchmarks.noise import Judged
from megarl.benchmarks.report import median, phase_medians

_WIDTH, _ROW, _LEFT, _RIGHT = 720, 22, 150, 110
_STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:72em}"
    "table{border-collapse:collapse}td,th{padding:2px 10px;white-space:nowrap}"
)
_BAR, _THEN, _FLOOR = "#2471a3", "#b0b0b0", "#c0392b"
_KIND = ("case", "dtype", "overrides", "host")


def page(
    history: Sequence[Mapping[str, Any]],
    lines: JudgedLines,
    cells: Sequence[Cell] = (),
    failed: Mapping[str, str] | None = None,
) -> str:
    """Return the page.

    Args:
        history: all lines, those of `lines` at the end.
        lines: the lines of this session, and how they compare.
        cells: cells of a matrix, also those that were left out.
        failed: messages of those that failed, by name.
    """
    parts = ["<!doctype html><meta charset='utf-8'><title>megarl bench</title>", f"<style>{_STYLE}</style>"]
    parts += ["<h1>megarl bench</h1>", *matrix_html(lines, cells, failed or {}), *published_html(history)]
    for line, judged in lines:
        kind = [other for other in history if all(other[name] == line[name] for name in _KIND)]
        same = [other for other in kind if other["layout"] == line["layout"] and other["metric"] == line["metric"]]
        parts += [_head(line), _verdicts(judged), "<h3>Phases</h3>", _bars(line, same[-2] if len(same) > 1 else None)]
        if len({other["layout"]["nproc"] for other in kind}) > 1:
            parts += ["<h3>Scaling</h3>", _scaling(kind)]
        parts += ["<h3>History</h3>", _history(same)]
    return "\n".join(parts) + "\n"


def _head(line: Mapping[str, Any]) -> str:
    text = f"{line['case']} {line['dtype']} on {line['host']}, commit {line['commit']}{'+' * line['changed']}"
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    settings = " ".join(line["overrides"])
    return f"<h2>{html.escape(text)}</h2><p>{html.escape(settings)}</p><p>{html.escape(versions)}</p>"


def _verdicts(judged: Mapping[str, Judged]) -> str:
    rows = ["<tr><th>beside<th>ratio<th>99%<th>limit<th></tr>"]
    for name, judgement in judged.items():
        verdict = "slower" if judgement.slower else "faster" if judgement.faster else "the same"
        cells = [html.escape(name), *judgement.texts(), verdict]
        rows.append("<tr><td>" + "<td>".join(cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _svg(height: float, parts: Sequence[str]) -> str:
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" font-size="12">'
    return "\n".join([opened, *parts, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _bars(line: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Draw a bar per phase, the line before in grey below it, and the floor of the step as a line."""
    now, then = (
        {} if other is None else phase_medians(other["rounds"]) | {"step": median(other["rounds"], "wall_s")}
        for other in (line, before)
    )
    most = max([*now.values(), *then.values(), line["floor_s"]])
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    parts = []
    for number, (name, seconds) in enumerate(now.items()):
        y = number * _ROW
        parts.append(_text(_LEFT - 6, y + 14, name, "end"))
        parts.append(f'<rect x="{_LEFT}" y="{y + 4}" width="{seconds * scale:.1f}" height="9" fill="{_BAR}"/>')
        if name in then:
            width = then[name] * scale
            parts.append(f'<rect x="{_LEFT}" y="{y + 14}" width="{width:.1f}" height="4" fill="{_THEN}"/>')
        parts.append(_text(_LEFT + seconds * scale + 6, y + 14, f"{seconds:.3g} s"))
    height = len(now) * _ROW
    x = _LEFT + line["floor_s"] * scale
    parts.append(f'<path d="M{x:.1f} 0 V{height}" stroke="{_FLOOR}" stroke-dasharray="4 3"/>')
    parts.append(_text(x, height + 14, f"floor of a step, {line['floor_s']:.3g} s", "middle"))
    return _svg(height + 20, parts)


def _curve(points: Sequence[tuple[float, float, str]], unit: str, spread: Sequence[tuple[float, float]] = ()) -> str:
    """Draw the points from left to right with their labels below; `spread`: least and most of each."""
    height, top, bottom = 220, 20, 40
    highest = max([y for _, y, _ in points] + [high for _, high in spread]) * 1.1
    first, last = points[0][0], points[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), top + (height - top - bottom) * (1 - y / highest)

    placed = [place(x, y) for x, y, _ in points]
    parts = [f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in placed)}" fill="none" stroke="{_BAR}"/>']
    for number, ((x, y), (at, value, label)) in enumerate(zip(placed, points, strict=True)):
        if spread:
            ends = [place(at, end)[1] for end in spread[number]]
            parts.append(f'<path d="M{x:.1f} {ends[0]:.1f} V{ends[1]:.1f}" stroke="{_THEN}"/>')
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_BAR}"><title>{value:.4g} {unit}</title></circle>'
        )
        if number in (0, len(points) - 1) or len(points) <= 8:
            parts.append(_text(x, height - 14, label, "middle"))
    x, y = placed[-1]
    parts += [_text(x + 8, y + 4, f"{points[-1][1]:.4g} {unit}"), _text(6, top + 4, f"0 to {highest:.3g} {unit}")]
    return _svg(height, parts)


def _scaling(kind: Sequence[Mapping[str, Any]]) -> str:
    """Return the tokens per second by processes, the newest line of each number."""
    newest = {line["layout"]["nproc"]: line["tokens_per_s"] for line in kind}
    return _curve([(n, newest[n], f"{n} processes") for n in sorted(newest)], "tokens/s")


def _history(same: Sequence[Mapping[str, Any]]) -> str:
    """Return the median seconds of each session, and the minimum and maximum over its rounds."""
    seconds = [[measurement[line["metric"]] for measurement in line["rounds"]] for line in same]
    days = [time.strftime("%Y-%m-%d", time.gmtime(line["time"])) for line in same]
    labels = [f"{line['commit'][:7]} {day}" for line, day in zip(same, days, strict=True)]
    points = [(float(at), statistics.median(rounds), labels[at]) for at, rounds in enumerate(seconds)]
    return _curve(points, "s", [(min(rounds), max(rounds)) for rounds in seconds])
