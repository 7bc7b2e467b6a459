"""`megarl bench --compare` and `--matrix` (megarl.benchmarks.throughput): rounds in turn, a history, and a page.

A line of the history has commit, machine, versions, and the seconds of every round. Compared are CPU-seconds of a step
(with GPUs wall seconds) with lines of the same case, dtype, settings, layout and kind of machine. Exit code 1: a case
is slower beyond the noise that was measured (megarl.benchmarks.noise), or a combination of a matrix has failed. The
page has the matrix, published figures, bars per phase, the floor, the scaling over processes and the history.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.artifacts.jsonl import JsonlWriter, read_jsonl
from megarl.benchmarks import matrix_view
from megarl.benchmarks.matrix import Cell, Matrix, read_matrix
from megarl.benchmarks.noise import Judged, apart, in_turn
from megarl.benchmarks.program import LIMIT_S, run_program
from megarl.benchmarks.report import host_class, phase_medians
from megarl.benchmarks.sources import commit_now, package_of
from megarl.system.errors import UserError, WorkerError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Entry: TypeAlias = dict[str, Any]
#: (folder of a package, what to measure) -> the result of `megarl bench`.
Measure: TypeAlias = Callable[[Path | None, Sequence[str]], Mapping[str, Any]]
_ROUNDS, _LEAST = 5, 3
# seconds in addition to the runs' own limits, so that a hanging run reaches its own limit first: that error names the
# run
_FLOOR_S = 900.0
_SAME = ("case", "dtype", "overrides", "layout", "host", "metric")


def measure(sources: Path | None, shape: Sequence[str], limit_s: float = LIMIT_S) -> Mapping[str, Any]:
    """Run one round in a process of its own.

    Args:
        sources: folder of the package; None: the one that is installed.
        shape: arguments of `megarl bench`.
        limit_s: seconds of the run in it, at most; the floor is measured after it.

    Raises:
        WorkerError: it failed, or hangs.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-round-") as folder:
        file = Path(folder) / "round.json"
        environment = os.environ if sources is None else os.environ | {"PYTHONPATH": str(sources)}
        command = [sys.executable, "-m", "megarl", "bench", *shape, "--json", str(file)]
        run_program(command, environment, limit_s=limit_s + _FLOOR_S)
        return json.loads(file.read_text())


def compare(arguments: argparse.Namespace, measure_round: Measure | None = None) -> int:
    """Measure in rounds, compare, append to the history, write the page; 1: something is slower, or failed.

    Raises:
        UserError: too few rounds for a comparison, or nothing that could run.
    """
    from rich.console import Console

    from megarl.benchmarks.page import page

    matrix = None if arguments.matrix is None else read_matrix(arguments.matrix)
    rounds = arguments.rounds or (_ROUNDS if matrix is None else matrix.rounds)
    if arguments.compare and rounds < _LEAST:
        raise UserError("too few rounds to measure noise", where="--rounds", found=rounds, allowed=f"{_LEAST} or more")
    console = Console(highlight=False)
    cells = _cells(arguments, matrix)
    for line in matrix_view.refusals(cells):
        print(line, flush=True)
    if arguments.dry_run:
        print(matrix_view.listed(cells))
        return 0
    runnable = [cell for cell in cells if cell.refused is None]
    if not runnable:
        raise UserError(
            "no combination can run here",
            where="--matrix",
            found=arguments.matrix,
            fix="remove the causes listed above",
        )
    limit_s = _limit_s(arguments, matrix)
    measure_round = measure_round or functools.partial(measure, limit_s=limit_s or LIMIT_S)
    rounds_file = arguments.history.with_suffix(".rounds.jsonl")
    with contextlib.closing(JsonlWriter(rounds_file)) as writer:
        measured = _rounds(runnable, rounds, arguments.base, measure_round, writer, keep_going=matrix is not None)
    history = read_jsonl(arguments.history)
    judged_lines = _judged_lines(arguments, runnable, measured, history, matrix)
    lines = [*history, *(line for line, _ in judged_lines)]
    _show(console, judged_lines, lines, measured, matrix, judged=arguments.compare)
    target = arguments.page or arguments.history.with_suffix(".html")
    target.write_text(page(lines, judged_lines, cells, measured.failed))
    console.print(f"history: {arguments.history}\npage: {target}")
    slower = any(verdict.slower for _, judged in judged_lines for verdict in judged.values())
    return int(slower or bool(measured.failed))


def _limit_s(arguments: argparse.Namespace, matrix: Matrix | None) -> float | None:
    return arguments.limit_s or (None if matrix is None else matrix.limit_s)


def _judged_lines(
    arguments: argparse.Namespace,
    cells: Sequence[Cell],
    measured: Measured,
    history: Sequence[Entry],
    matrix: Matrix | None,
) -> list[tuple[Entry, dict[str, Judged]]]:
    """Return a line of each cell that was measured, and how it compares; they are appended to the history.

    A cell that failed in a later round keeps its earlier rounds; its line has the message, and is not compared.
    """
    lines = []
    with contextlib.closing(JsonlWriter(arguments.history)) as writer:
        for cell, (now, then) in zip(cells, measured.results, strict=True):
            if not now:
                continue
            line = entry(now, baseline=arguments.set_baseline)
            if matrix is not None:
                line |= {"matrix": matrix.name, "cell": dict(cell.labels)}
            whole = cell.name not in measured.failed
            if not whole:
                line["failed"] = measured.failed[cell.name]
            judged = beside(line, history) if arguments.compare and whole else {}
            if then and whole:
                base = entry(then, baseline=False)
                judged = {f"commit {arguments.base}, in turn": in_turn(_seconds(line), _seconds(base)), **judged}
            writer.write(line)
            lines.append((line, judged))
    return lines


def _show(
    console: Console,
    judged_lines: Sequence[tuple[Entry, dict[str, Judged]]],
    lines: Sequence[Entry],
    measured: Measured,
    matrix: Matrix | None,
    *,
    judged: bool,
) -> None:
    if matrix is not None and judged_lines:
        console.print(matrix_view.table(matrix.name, judged_lines))
    for line, verdicts in judged_lines if judged else []:
        console.print(table(line, verdicts))
    for name, message in measured.failed.items():
        print(f"failed: {name}\n{message}")
    for shown in matrix_view.published(lines, [line["case"] for line, _ in judged_lines]):
        console.print(shown)


def _cells(arguments: argparse.Namespace, matrix: Matrix | None) -> list[Cell]:
    """Return the cells to measure: a matrix, or cases by dtype."""
    from megarl.benchmarks.throughput import CASES

    options = [text for option, value in _options(arguments, matrix) if value for text in (option, str(value))]
    if matrix is not None:
        return matrix.cells(arguments.overrides, options, starts=not arguments.dry_run)
    return [
        Cell(["--case", case, "--dtype", dtype, *options, *arguments.overrides])
        for case in arguments.case or CASES
        for dtype in arguments.dtype or ["default"]
    ]


def _options(arguments: argparse.Namespace, matrix: Matrix | None) -> list[tuple[str, object]]:
    """Return the arguments of every round; those that a matrix sets by its axes are refused beside one."""
    if matrix is not None:
        for name in ("case", "dtype", "nproc", "threads"):
            if getattr(arguments, name) is not None:
                raise UserError(
                    "the matrix already sets this",
                    where=f"--{name}",
                    found=getattr(arguments, name),
                    allowed="only without --matrix",
                    fix="remove the option, or write a matrix of your own: a file with `axes`, see docs/benchmarks.md",
                )
    steps = arguments.steps or (None if matrix is None else matrix.steps)
    named = [(f"--{name}", getattr(arguments, name)) for name in ("nproc", "threads")]
    return [*named, ("--steps", steps), ("--runs", arguments.runs), ("--limit-s", _limit_s(arguments, matrix))]


@dataclass(frozen=True)
class Measured:
    """The results of rounds.

    Attributes:
        results: results of the present code and of the base's, by cell.
        failed: messages of cells that did not come to their end, by name.
    """

    results: list[tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]]
    failed: dict[str, str]


def _rounds(
    cells: Sequence[Cell],
    rounds: int,
    base: str | None,
    measure_round: Measure,
    writer: JsonlWriter,
    *,
    keep_going: bool,
) -> Measured:
    """Return all cells in every round; who is first, this code or the base, changes from round to round.

    Args:
        writer: records every round as soon as it is over, so that a stopped session loses no finished round.
        keep_going: a cell that fails is left out of later rounds; else its error ends the measurement.
    """
    measured = Measured([([], []) for _ in cells], {})
    with contextlib.ExitStack() as stack:
        # Without a base the installed package is measured as it is.
        sides = [(0, stack.enter_context(package_of(None)) if base else None)]
        if base:
            sides.append((1, stack.enter_context(package_of(base))))
        for number in range(rounds):
            for cell, results in zip(cells, measured.results, strict=True):
                if cell.name in measured.failed:
                    continue
                try:
                    for side, sources in sides if number % 2 == 0 else reversed(sides):
                        result = measure_round(sources, cell.shape)
                        results[side].append(result)
                        round_of = {"cell": dict(cell.labels), "round": number + 1, "base": base if side else None}
                        writer.write({"time": time.time(), **round_of, "result": result})
                except WorkerError as error:
                    if not keep_going:
                        raise
                    measured.failed[cell.name] = str(error)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return measured


def entry(results: Sequence[Mapping[str, Any]], *, baseline: bool) -> Entry:
    """Return a line of the history from the rounds of one case."""
    first = results[0]
    machine = first["machine"]
    commit, changed = commit_now()
    return {
        "time": time.time(),
        "commit": commit,
        "changed": changed,
        "baseline": baseline,
        "host": host_class(machine),
        "machine": {name: value for name, value in machine.items() if name != "packages"},
        "versions": machine["packages"],
        **{name: first[name] for name in ("case", "dtype", "overrides", "layout")},
        "metric": "wall_s" if machine["gpus"] else "cpu_s",
        "floor_s": statistics.median(result["summary"]["floor_s"] for result in results),
        "others_share": max(result["others_share"] for result in results),
        "tokens_per_s": statistics.median(result["summary"]["tokens_per_s"] for result in results),
        "gpus": first.get("gpus", 0),  # older code does not write it
        "rounds": [
            {
                "wall_s": result["summary"]["wall_s"],
                "cpu_s": result["summary"]["cpu_s"],
                "phases": phase_medians(result["steps"]),
            }
            for result in results
        ],
    }


def _seconds(line: Entry) -> list[float]:
    return [measurement[line["metric"]] for measurement in line["rounds"]]


def alike(line: Entry, history: Sequence[Entry]) -> list[Entry]:
    """Return the lines that measured the same to its end on the same kind of machine, oldest first."""
    whole = (other for other in history if "failed" not in other)
    return [other for other in whole if all(other.get(name) == line[name] for name in _SAME)]


def beside(line: Entry, history: Sequence[Entry]) -> dict[str, Judged]:
    """Compare it with the last line of its kind, and with the newest baseline."""
    same = alike(line, history)
    marked = [other for other in same if other["baseline"]]
    groups = {"last": same[-1:], "baseline": marked[-1:]}
    return {
        f"{name} ({other['commit']})": apart(_seconds(line), _seconds(other), _sessions(other, same))
        for name, lines in groups.items()
        for other in lines
    }


def _sessions(then: Entry, same: Sequence[Entry]) -> list[list[float]]:
    """Return the rounds of all sessions with the code of `then`; uncommitted changes make each session another code."""
    return [_seconds(line) for line in same if line["commit"] == then["commit"] and not line["changed"]]


def table(line: Entry, judged: Mapping[str, Judged]) -> Table:
    """Return a table of the comparisons: the other line, the ratio, its interval, and the verdict."""
    from rich.table import Table

    seconds = _seconds(line)
    layout = line["layout"]
    made_of = f"{layout['nproc']} processes x {layout['threads']} threads"
    named = ", ".join(line["cell"].values()) if "cell" in line else f"{line['case']} {line['dtype']}"
    title = f"{named}, {made_of}: {statistics.median(seconds):.4g} s ({line['metric']})"
    shown = Table(title=title, title_justify="left")
    for column in ("beside", "ratio", "99%", "limit", ""):
        shown.add_column(column, justify="left" if column in ("beside", "") else "right")
    for name, judgement in judged.items():
        verdict = "SLOWER" if judgement.slower else "faster" if judgement.faster else "the same within noise"
        shown.add_row(name, *judgement.texts(), verdict)
    if not judged:
        shown.add_row("no earlier measurement of this kind", "", "", "", "")
    return shown
