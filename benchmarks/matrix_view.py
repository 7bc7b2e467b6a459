"""A measured matrix, what was left out of it, and published figures, as tables and for the page."""

from __future__ import annotations

import html
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.benchmarks.matrix import Cell
from megarl.benchmarks.noise import Judged
from megarl.benchmarks.published import COLUMNS, per_gpu, rows
from megarl.benchmarks.report import median

if TYPE_CHECKING:
    from rich.table import Table

QUIET = 0.05  # share of the CPU time that other processes may use; above it, wall-clock times are marked as doubtful
_NUMBERS = ("s", "least-most", "CPU-s", "x floor", "tokens/s", "per GPU", "others")
JudgedLines = Sequence[tuple[Mapping[str, Any], Mapping[str, Judged]]]


def refusals(cells: Sequence[Cell]) -> list[str]:
    """Return a line for each combination that cannot run."""
    return [f"left out: {cell.name}: {cell.refused}" for cell in cells if cell.refused is not None]


def listed(cells: Sequence[Cell]) -> str:
    """Return one line for each combination that would run: its name and the command that measures it."""
    runnable = [cell for cell in cells if cell.refused is None]
    lines = [f"{cell.name}: megarl bench {shlex.join(cell.shape)}" for cell in runnable]
    return "\n".join([*lines, f"{len(runnable)} of {len(cells)} combinations; nothing was started"])


def table(name: str, lines: JudgedLines) -> Table:
    """Return a row for each combination that was measured."""
    from rich.table import Table

    doubtful = max(line["others_share"] for line, _ in lines) > QUIET
    note = "other programs took part of the machine: wall seconds are in doubt" if doubtful else ""
    first = lines[0][0]
    title = (
        f"matrix {name} on {first['host']}, {max(len(line['rounds']) for line, _ in lines)} rounds, medians of a step"
    )
    made_of = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    made_of.add_column(", ".join(first["cell"]), overflow="fold")
    shown = [column for column in _NUMBERS if column != "per GPU" or first["gpus"]]
    for column in shown:
        made_of.add_column(column, justify="right", no_wrap=True)
    for line, _ in lines:
        numbers = _numbers(line)
        made_of.add_row(", ".join(line["cell"].values()), *(numbers[column] for column in shown))
    return made_of


def _numbers(line: Mapping[str, Any]) -> dict[str, str]:
    walls = [measurement["wall_s"] for measurement in line["rounds"]]
    wall = statistics.median(walls)
    return {
        "s": f"{wall:.3g}",
        "least-most": f"{min(walls):.3g}-{max(walls):.3g}",
        "CPU-s": f"{median(line['rounds'], 'cpu_s'):.3g}",
        "x floor": f"{wall / line['floor_s']:.2f}",
        "tokens/s": f"{line['tokens_per_s']:,.0f}",
        "per GPU": f"{per_gpu(line):,.0f}" if line["gpus"] else "",
        "others": f"{line['others_share']:.0%}",
    }


def published(history: Sequence[Mapping[str, Any]], cases: Sequence[str]) -> Iterator[Table]:
    """Yield the figures that stand beside these cases, if any do."""
    from rich.table import Table

    figures = rows(history, cases)
    if figures:
        shown = Table(title="beside published figures (docs/benchmarks.md)", title_justify="left")
        for column in COLUMNS:
            shown.add_column(column)
        for row in figures:
            shown.add_row(*row)
        yield shown


# -- the page ----------------------------------------------------------------------------------------------------------


def matrix_html(lines: JudgedLines, cells: Sequence[Cell], failed: Mapping[str, str]) -> list[str]:
    """Return the matrix of this session as HTML, with a bar of tokens per second for each cell; [] without one."""
    measured = [line for line, _ in lines if "cell" in line]
    if not measured:
        return []
    most = max(line["tokens_per_s"] for line in measured)
    head = [*measured[0]["cell"], *_NUMBERS, ""]
    parts = [f"<h2>Matrix {html.escape(measured[0]['matrix'])}</h2>", _row("th", head)]
    for line in measured:
        width = 160 * line["tokens_per_s"] / most
        bar = f'<div style="width:{width:.0f}px;height:9px;background:#2471a3"></div>'
        parts.append(_row("td", [*line["cell"].values(), *_numbers(line).values()], bar))
    left_out = [(cell.name, f"left out: {cell.refused}") for cell in cells if cell.refused is not None]
    left_out += [(name, f"failed: {_last_line(message)}") for name, message in failed.items()]
    return _table(parts[1:], parts[0]) + [f"<p>{html.escape(f'{name}: {why}')}</p>" for name, why in left_out]


def _last_line(message: str) -> str:
    """Return the last line that a program wrote: the first line of an error is its command."""
    return next((line for line in reversed(message.splitlines()) if line.strip()), "no output")


def published_html(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all published figures, ours beside them."""
    parts = [_row("th", COLUMNS), *(_row("td", row) for row in rows(history))]
    return _table(parts, "<h2>Published figures</h2>")


def _table(parts: Sequence[str], head: str) -> list[str]:
    return [head, f"<table>{''.join(parts)}</table>"]


def _row(kind: str, cells: Sequence[str], more: str = "") -> str:
    text = "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in cells)
    return f"<tr>{text}{f'<td>{more}</td>' if more else ''}</tr>"
