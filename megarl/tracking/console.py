"""The console of a run: progress bars on a terminal, plain lines in a log file, a table at the end."""

from __future__ import annotations

import collections
import contextlib
import json
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megarl.artifacts.jsonl import finite
from megarl.system.errors import duration, printable
from megarl.tracking.names import FINAL_TABLE, STEP_LINE, Shown, number
from megarl.tracking.teams import BOTTLENECK, bounding_team

Mode = Literal["auto", "plain", "quiet", "json"]

_BAR = "training"
_COLUMNS = ["first", "best", "last"]
_ONLY = ["value"]  # column titles when all records belong to one step
_WIDTH = 80  # columns of a line
_END_WIDTH = 20  # columns at the end of a step's line for its seconds and the time left
_SECONDS, _ACCURACY = "timing_s/step", "val/acc"
_GRADED = "val/graded"  # metric that exists if scores other than 0 and 1 were averaged, so that the mean is no accuracy
_LOG_EVERY_S = 15.0  # seconds between progress lines where no bar can be shown


class ConsoleView:
    """The step lines, progress bars and final table of one run.

    Args:
        total_steps: steps of the run, for `12/160`; None: unknown.
        console: where to write; None: standard output.
        label: first word of a step line.
        mode: value of `tracking.console`.
    """

    def __init__(
        self, total_steps: int | None, console: Console | None = None, label: str = "step", mode: Mode = "auto"
    ) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._total, self._label, self._mode = total_steps, label, mode
        self._bars: Progress | None = None
        self._bar = TaskID(0)
        self._ends: collections.deque[tuple[int, float]] = collections.deque(maxlen=20)  # (step, time at its end)
        self._best: tuple[int, float] | None = None  # the best validation: step, accuracy
        self._explained = False  # whether the abbreviations of a step line have been explained
        if self.console.is_terminal and mode == "auto":
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
        """Print a line with the key metrics of a step, if present, and a line about its validation."""
        if self._bars is not None:
            self._bars.update(self._bar, completed=step)
        self._ends.append((step, time.monotonic()))
        if self._mode == "json":
            stage = "train" if self._label == "step" else self._label
            line = json.dumps(finite({"step": step, "stage": stage, **metrics}), allow_nan=False)
            self.console.print(Text(line), soft_wrap=True)
            return
        if self._mode != "quiet":
            text = self.step_text(step, metrics)
            self.console.print(text)
            if not self._explained:
                self._explain(text.plain, metrics)
        for line in self.validation_lines(step, metrics):
            self.console.print(Text(line))

    def step_text(self, step: int, metrics: dict[str, float]) -> Text:
        """Return the step line: step, percent, as many metrics as fit, seconds, time left."""
        total = self._total
        width = len(str(total)) if total else 5
        line = Text(f"{self._label} {step:>{width}}", style="bold")
        if total:
            line.append(f"/{total} {100 * step // total:>3}%")
        end = Text()
        if _SECONDS in metrics:
            end.append(f" {number(metrics[_SECONDS], 3):>5} s", style="not bold")
        if (left := self._left_s(step)) is not None:
            end.append(f" {f'{duration(left)} left':>11}", style="not bold dim")
        room = _WIDTH - len(line) - _END_WIDTH
        for shown in STEP_LINE:
            if shown.name not in metrics:
                continue
            part = Text(f"  {shown.short}" if shown.short else " ", style="not bold dim")
            style = "not bold green" if shown.better == "up" else "not bold"
            part.append(f"{number(metrics[shown.name], 3):>8}{shown.unit and ' '}{shown.unit}", style=style)
            if len(part) > room:
                break
            room -= len(part)
            line.append_text(part)
        return line.append_text(end)

    def _explain(self, line: str, metrics: dict[str, float]) -> None:
        long = {shown.name: shown.short for shown in FINAL_TABLE}
        marks = {shown.short or shown.unit: long.get(shown.name) for shown in STEP_LINE if shown.name in metrics}
        words = line.split()
        text = "; ".join(f"{mark}: {name}" for mark, name in marks.items() if name and mark in words and mark != name)
        if text:  # some lines have no abbreviations, such as that of a validation before the first step
            self._explained = True
            for part in textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  "):
                self.console.print(Text(part, style="dim"))

    def _left_s(self, step: int) -> float | None:
        """Return the estimated seconds until the last step, from the latest steps; None when unknown."""
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        if not self._total or last == first or step >= self._total:
            return None
        return (ended - began) / (last - first) * (self._total - step)

    def validation_lines(self, step: int, metrics: dict[str, float]) -> list[str]:
        """Return the console's lines about a validation: accuracy, pass@k, maj@k, loss, number of prompts, and a
        comparison with the best validation so far. Of two equally good validations the later is the best, as for
        `hf_best`.
        """
        if _ACCURACY not in metrics:
            return []
        value = metrics[_ACCURACY]
        graded = bool(metrics.get(_GRADED))
        shown = number if graded else _share
        text = f"validation: {'mean score' if graded else 'accuracy'} {shown(value)}"
        many = [name for name in metrics if name.startswith(("val/pass@", "val/maj@"))]
        text += "".join(f", {name.removeprefix('val/')} {_share(metrics[name])}" for name in many)
        if "val/loss" in metrics:
            text += f", loss {metrics['val/loss']:.3g}"
        if "val/prompts" in metrics:
            text += f" of {metrics['val/prompts']:,.0f} prompts"
        if "val/samples" in metrics and metrics["val/samples"] != metrics.get("val/prompts"):
            text += f" ({metrics['val/samples']:,.0f} samples)"
        if self._best is not None and self._best[1] > value:
            text += f"; best {shown(self._best[1])} at step {self._best[0]}"
        elif self._best is not None and value > self._best[1]:
            text += "; the best so far"
        elif self._best is not None and value:
            text += f"; as good as the best, of step {self._best[0]}"
        self.recall(step, metrics)
        return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")

    def recall(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Update the best values so far by a validation; also called for validations from before a run was resumed."""
        value = metrics.get(_ACCURACY)
        if isinstance(value, (int, float)) and (self._best is None or value >= self._best[1]):
            self._best = (step, value)

    @contextlib.contextmanager
    def progress(self, description: str, total: int | None) -> Iterator[Callable[[float], None]]:
        """Show the progress of long work. In the block, call the yielded function, from any thread, with the number of
        units completed since its last call.

        On a terminal the text and the bar share one line, because a recorded log would contain every redraw of a second
        line. Elsewhere a plain line is printed from time to time.
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
                elif time.monotonic() - last >= _LOG_EVERY_S and self._mode in ("auto", "plain"):
                    last = time.monotonic()
                    percent = f" ({100 * done / total:.0f}%)" if total else ""
                    self.console.print(f"{printable(description)}: {share}{percent}, {last - start:.0f} s")

        try:
            yield advance
        finally:
            if self._bars is not None:
                self._bars.update(self._bar, description=_BAR)

    def note(self, message: str) -> None:
        """Print one plain line."""
        if self._mode == "json":
            return
        self.console.print(Text(printable(message)))

    def final(self, title: str, records: list[dict[str, Any]]) -> None:
        """Print a table of the key metrics with first, best and last value; `records` are lines of metrics.jsonl.
        A validation before training (step 0) has its own column. If all records are of one step, there is one column.
        """
        self.close()
        rows = summary(records)
        if not rows or self._mode == "json":
            return
        table = Table(title=Text(printable(title)), title_justify="left", title_style="bold")
        table.add_column("metric")
        if len({record["step"] for record in records}) == 1:
            rows, columns = [(shown, {"value": row["last"]}) for shown, row in rows], _ONLY
        else:
            columns = ["before", *_COLUMNS] if any("before" in row for _, row in rows) else _COLUMNS
        for column in columns:
            table.add_column(column, justify="right")
        for shown, row in rows:
            cells = {name: number(value * shown.scale) for name, value in row.items() if name != "best_step"}
            if "best" in row:
                cells["best"] += f" (step {row['best_step']})"
            unit = f" [{shown.unit}]" if shown.unit else ""
            table.add_row(Text(shown.short + unit), *(cells.get(column, "") for column in columns))
        names = sorted({name for record in records for name in record if name.startswith(BOTTLENECK)})
        bounds = bounding_team({name: [record[name] for record in records if name in record] for name in names})
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
    """Return (metric, {before, first, last, best, best_step}) of the key metrics that occur in the records.

    `before` is the value of step 0 if other steps follow; `first` and `last` exclude it, `best` does not. `best` exists
    only for metrics with a direction; among equal values the latest is taken.
    """
    rows = []
    trained = any(record["step"] > 0 for record in records)
    for shown in FINAL_TABLE:
        points = [(r["step"], r[shown.name]) for r in records if isinstance(r.get(shown.name), (int, float))]
        if not points:
            continue
        if shown.name == _ACCURACY and any(record.get(_GRADED) for record in records):
            shown = replace(shown, short="validation score")
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


def _share(value: float) -> str:
    return f"{100 * value:.1f}%" if 0 <= value <= 1 else number(value)
