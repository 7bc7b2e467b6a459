"""`megarl bench --compare` (megarl.benchmarks.throughput): is this code slower than it was?

A line of the history has commit, machine, versions, and the seconds of every round. Compared are CPU-seconds of a step
(with GPUs wall seconds) with lines of the same case, dtype, settings, layout and kind of machine. Exit code 1: a case
is slower beyond the noise that was measured (megarl.benchmarks.noise). The page has bars per phase, the floor, the
scaling over processes and the history.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.artifacts.jsonl import JsonlWriter, read_jsonl
from megarl.benchmarks.noise import Judged, apart, in_turn
from megarl.benchmarks.program import run_program
from megarl.benchmarks.report import host_class, phase_medians
from megarl.benchmarks.sources import commit_now, package_of
from megarl.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

Entry: TypeAlias = dict[str, Any]
#: (folder of a package, what to measure) -> the result of `megarl bench`.
Measure: TypeAlias = Callable[[Path | None, Sequence[str]], Mapping[str, Any]]
_SAME = ("case", "dtype", "overrides", "layout", "host", "metric")


def measure(sources: Path | None, shape: Sequence[str]) -> Mapping[str, Any]:
    """One round in a process of its own.

    Args:
        sources: folder of the package; None: the one that is installed.
        shape: arguments of `megarl bench`.

    Raises:
        WorkerError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-round-") as folder:
        file = Path(folder) / "round.json"
        environment = os.environ if sources is None else os.environ | {"PYTHONPATH": str(sources)}
        run_program([sys.executable, "-m", "megarl", "bench", *shape, "--json", str(file)], environment)
        return json.loads(file.read_text())


def compare(arguments: argparse.Namespace, measure_round: Measure = measure) -> int:
    """Measure in rounds, compare, append to the history, write the page; 1: something is slower."""
    from rich.console import Console

    from megarl.benchmarks.page import page

    if arguments.rounds < 3:
        raise UserError("noise is measured", where="--rounds", found=arguments.rounds, allowed="3 or more")
    shapes = _shapes(arguments)
    now, then = _rounds(shapes, arguments.rounds, arguments.base, measure_round)
    history = read_jsonl(arguments.history)
    console, slower = Console(highlight=False), False
    writer = JsonlWriter(arguments.history)
    found: list[tuple[Entry, dict[str, Judged]]] = []
    for number in range(len(shapes)):
        made = entry(now[number], baseline=arguments.set_baseline)
        judged = beside(made, history)
        if then[number]:
            base = entry(then[number], baseline=False)
            judged = {f"commit {arguments.base}, in turn": in_turn(_seconds(made), _seconds(base)), **judged}
        writer.write(made)
        found.append((made, judged))
        slower = slower or any(one.slower for one in judged.values())
    writer.close()
    for made, judged in found:
        console.print(table(made, judged))
    target = arguments.page or arguments.history.with_suffix(".html")
    target.write_text(page([*history, *(made for made, _ in found)], found))
    console.print(f"history: {arguments.history}\npage: {target}")
    return int(slower)


def _shapes(arguments: argparse.Namespace) -> list[list[str]]:
    """Arguments of a round, by case and dtype."""
    from megarl.benchmarks.throughput import CASES

    more = [text for option, value in _layout(arguments) if value is not None for text in (option, str(value))]
    return [
        ["--case", case, "--dtype", dtype, *more, *arguments.overrides]
        for case in arguments.case or CASES
        for dtype in arguments.dtype or ["default"]
    ]


def _layout(arguments: argparse.Namespace) -> list[tuple[str, int | None]]:
    return [(f"--{name}", getattr(arguments, name)) for name in ("nproc", "threads", "steps")]


def _rounds(
    shapes: Sequence[Sequence[str]], rounds: int, base: str | None, measure_round: Measure
) -> tuple[list[list[Mapping[str, Any]]], list[list[Mapping[str, Any]]]]:
    """Results of the present code and of the base's, by shape; who is first changes from round to round."""
    now: list[list[Mapping[str, Any]]] = [[] for _ in shapes]
    then: list[list[Mapping[str, Any]]] = [[] for _ in shapes]
    with contextlib.ExitStack() as stack:
        # Without a base the installed package is measured as it is.
        sides = [(now, stack.enter_context(package_of(None)) if base else None)]
        if base:
            sides.append((then, stack.enter_context(package_of(base))))
        for number in range(rounds):
            for place, shape in enumerate(shapes):
                for results, sources in sides if number % 2 == 0 else reversed(sides):
                    results[place].append(measure_round(sources, shape))
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return now, then


def entry(results: Sequence[Mapping[str, Any]], *, baseline: bool) -> Entry:
    """A line of the history from the rounds of one case."""
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
        "rounds": [
            {
                "wall_s": result["summary"]["wall_s"],
                "cpu_s": result["summary"]["cpu_s"],
                "phases": phase_medians(result["steps"]),
            }
            for result in results
        ],
    }


def _seconds(made: Entry) -> list[float]:
    return [one[made["metric"]] for one in made["rounds"]]


def alike(made: Entry, history: Sequence[Entry]) -> list[Entry]:
    """Lines that measured the same on the same kind of machine, oldest first."""
    return [one for one in history if all(one.get(name) == made[name] for name in _SAME)]


def beside(made: Entry, history: Sequence[Entry]) -> dict[str, Judged]:
    """How it compares with the last line of its kind, and with the newest baseline."""
    same = alike(made, history)
    marked = [one for one in same if one["baseline"]]
    found = {"last": same[-1:], "baseline": marked[-1:]}
    return {
        f"{name} ({one['commit']})": apart(_seconds(made), _seconds(one), _sessions(one, same))
        for name, lines in found.items()
        for one in lines
    }


def _sessions(then: Entry, same: Sequence[Entry]) -> list[list[float]]:
    """Rounds of all sessions with the other one's code; files that were changed are another code each time."""
    return [_seconds(one) for one in same if one["commit"] == then["commit"] and not one["changed"]]


def table(made: Entry, judged: Mapping[str, Judged]) -> Table:
    """What it is compared with, the ratio, its interval, and what that means."""
    from rich.table import Table

    seconds = _seconds(made)
    layout = made["layout"]
    made_of = f"{layout['nproc']} processes x {layout['threads']} threads"
    title = f"{made['case']} {made['dtype']}, {made_of}: {statistics.median(seconds):.4g} s ({made['metric']})"
    shown = Table(title=title, title_justify="left")
    for column in ("beside", "ratio", "99%", "limit", ""):
        shown.add_column(column, justify="left" if column in ("beside", "") else "right")
    for name, one in judged.items():
        verdict = "SLOWER" if one.slower else "faster" if one.faster else "the same, as far as noise lets see"
        shown.add_row(name, f"{one.ratio:.3f}", f"{one.low:.3f} to {one.high:.3f}", f"{one.limit:.3f}", verdict)
    if not judged:
        shown.add_row("nothing of its kind yet", "", "", "", "")
    return shown
