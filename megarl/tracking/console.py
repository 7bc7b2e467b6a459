"""The console of a run: progress bars on a terminal, plain lines in a log file, a table at the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megarl.tracking.names import FINAL_TABLE, STEP_LINE, Shown, number
from megarl.tracking.teams import BOTTLENECK, bounding_team

_BAR = "training"
_COLUMNS = ["first", "best", "last"]
_ONLY = ["value"]  # seconds between records of one step
_LOG_EVERY_S = 15.0  # seconds between progress lines where no bar can be shown


class ConsoleView:
    """The step lines, progress bars and final table of one run.

    Args:
        total_steps: steps of the run, for `12/160`; None: unknown.
        console: where to write; None: standard output.
        label: first word of a step line.
    """

    def __init__(self, total_steps: int | None, console: Console | None = None, label: str = "step") -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._total, self._label = total_steps, label
        self._bars: Progress | None = None
        self._bar = TaskID(0)
        if self.console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bars.start()
            self._bar = self._bars.add_task(_BAR, total=total_steps)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Print one line with the key metrics; absent metrics are left out."""
        if self._bars is not None:
            self._bars.update(self._bar, completed=step)
        self.console.print(self.step_text(step, metrics))

    def step_text(self, step: int, metrics: dict[str, float]) -> Text:
        """Return the step line, with numbers aligned from line to line."""
        width = len(str(self._total)) if self._total else 5
        line = Text(f"{self._label} {step:>{width}}" + (f"/{self._total}" if self._total else ""), style="bold")
        for shown in STEP_LINE:
            if shown.name in metrics:
                line.append(f"  {shown.short}" if shown.short else " ", style="not bold dim")
                style = "not bold green" if shown.better == "up" else "not bold"
                line.append(f"{number(metrics[shown.name], 3):>9}{shown.unit and ' '}{shown.unit}", style=style)
        return line

    @contextlib.contextmanager
    def progress(self, description: str, total: int | None) -> Iterator[Callable[[float], None]]:
        """Show long work; the body calls the given function, from any thread, with the units done since its last call.

        On a terminal its text precedes the single bar: with a second line every redraw would become a line of the log.
        Elsewhere a plain line is printed now and then.
        """
        start = last = time.monotonic()
        done, lock = 0.0, threading.Lock()

        def advance(units: float) -> None:
            nonlocal done, last
            with lock:
                done += units
                share = f"{done:g}/{total}" if total else f"{done:g}"
                if self._bars is not None:
                    self._bars.update(self._bar, description=f"{_BAR}, {description} {share}")
                elif time.monotonic() - last >= _LOG_EVERY_S:
                    last = time.monotonic()
                    percent = f" ({100 * done / total:.0f}%)" if total else ""
                    self.console.print(f"{description}: {share}{percent}, {last - start:.0f} s")

        try:
            yield advance
        finally:
            if self._bars is not None:
                self._bars.update(self._bar, description=_BAR)

    def note(self, message: str) -> None:
        """Print one plain line."""
        self.console.print(Text(message))

    def final(self, title: str, records: list[dict[str, Any]]) -> None:
        """Show first, best and last value of the key metrics over all records; a record is a line of metrics.jsonl.

        A validation before training (step 0) has a separate column. Records of one step have one column.
        """
        self.close()
        rows = summary(records)
        if not rows:
            return
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("metric")
        if len({record["step"] for record in records}) == 1:
            rows, columns = [(shown, {"value": row["last"]}) for shown, row in rows], _ONLY
        else:
            columns = ["before", *_COLUMNS] if any("before" in row for _, row in rows) else _COLUMNS
        for column in columns:
            table.add_column(column, justify="right")
        for shown, row in rows:
            cells = {name: number(value) for name, value in row.items() if name != "best_step"}
            if "best" in row:
                cells["best"] += f" (step {row['best_step']})"
            unit = f" [{shown.unit}]" if shown.unit else ""
            table.add_row(Text(shown.short + unit), *(cells.get(column, "") for column in columns))
        bounds = bounding_team(_bottlenecks(records))
        if bounds is not None:
            cells = {columns[-1]: bounds}
            table.add_row(Text("bounded by"), *(cells.get(column, "") for column in columns))
        self.console.print(table)

    def close(self) -> None:
        """Remove the progress bars."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def summary(records: list[dict[str, Any]]) -> list[tuple[Shown, dict[str, Any]]]:
    """Return (metric, {before, first, last, best, best_step}) of the key metrics that occur.

    `before` is the value of step 0 if other steps follow; `first` and `last` exclude it, `best` does not. `best` exists
    only for metrics with a direction; among equal values it is the last.
    """
    rows = []
    trained = any(record["step"] > 0 for record in records)
    for shown in FINAL_TABLE:
        points = [(r["step"], r[shown.name]) for r in records if isinstance(r.get(shown.name), (int, float))]
        if not points:
            continue
        row: dict[str, Any] = {}
        after = points
        if trained and points[0][0] == 0:
            row["before"], after = points[0][1], points[1:]
        if after:
            row |= {"first": after[0][1], "last": after[-1][1]}
        if shown.better is not None:
            pick = max if shown.better == "up" else min
            row["best_step"], row["best"] = pick(reversed(points), key=lambda point: point[1])
        rows.append((shown, row))
    return rows


def _bottlenecks(records: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return the values of the metrics that tell which team bounds a step."""
    names = {name for record in records for name in record if name.startswith(BOTTLENECK)}
    return {name: [record[name] for record in records if name in record] for name in sorted(names)}
