"""The gain of running ahead of training: `python -m megarl.benchmarks.overlap`.

    python -m megarl.benchmarks.overlap                                # phases that take equally long
    python -m megarl.benchmarks.overlap --case tails --steps 60        # which steps wait is chance: take many
    python -m megarl.benchmarks.overlap --case environments            # episodes of a slow environment
    python -m megarl.benchmarks.overlap --json overlap.json

Real runs of two teams, one worker each, whose samples and optimizer steps are sleeps, which cost no CPU: everything
else is megarl's own (store, weights, metrics, files). Beside each stands the pipeline in which nothing else takes time
(megarl.benchmarks.overlap.ideal), with the same seconds of every sample. The first and the last steps are not counted.

Exit code 1: a mode is more than 10% off its ideal pipeline; or, in the cases `balanced` and `environments`, less than
1.5 times as fast as the synchronous one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.benchmarks.overlap.ideal import flowing, in_order, synchronous
from megarl.benchmarks.overlap.work import CASES, SEED, Work
from megarl.benchmarks.program import run_program
from megarl.errors import WorkerError

if TYPE_CHECKING:
    from rich.table import Table

    from megarl.config.run import RunConfig

FIRST, LAST = 4, 2  # steps that are not counted
OFF, FASTER = 0.1, 1.5  # share by which a mode may differ from its ideal; what each brings at least
SYNCHRONOUS = "synchronous"
#: Settings of `async`, and the ends of all steps of the ideal pipeline.
MODES: dict[str, tuple[str, Callable[[Work, int], list[float]]]] = {
    SYNCHRONOUS: ("{max_staleness: 0}", synchronous),
    "in_order, k=1": ("{max_staleness: 1}", in_order),
    "in_order, k=2": ("{max_staleness: 2}", partial(in_order, lag=2)),
    "as_ready, k=2": (
        "{max_staleness: 2, order: as_ready}",
        lambda work, steps: flowing(work, steps, 2, partial=False),
    ),
    "as_ready, k=2, partial": (
        "{max_staleness: 2, order: as_ready, partial: true}",
        lambda work, steps: flowing(work, steps, 2, partial=True),
    ),
}


def steps_per_minute(ends: Sequence[float]) -> float:
    """Return the steps per minute of the counted steps of a run whose steps ended at these seconds."""
    counted = ends[FIRST - 1 : len(ends) - LAST]
    return 60 * (len(counted) - 1) / (counted[-1] - counted[0])


def recipe(work: Work, settings: str, steps: int) -> RunConfig:
    """Return the configuration of a run."""
    from megarl.benchmarks.case import FOLDER
    from megarl.config.load import load_config

    return load_config(
        FOLDER / "overlap.yaml",
        [
            f"async={settings}",
            f"data.batch_size={work.groups}",
            f"rollout.sampling.n={work.samples}",
            f"rollout.sampling.max_new_tokens={work.longest}",
            f"rollout.max_running={work.slots}",
            f"trainer.steps={steps}",
            f"trainer.seed={SEED}",
            *(["env.name=megarl.benchmarks.overlap.sleeping:Thinking"] if work.thinks else []),
        ],
    )


def run(work: Work, settings: str, steps: int, run_dir: Path) -> dict[str, Any]:
    """Run in this new folder; return when its steps ended, seconds of pushing weights, and CPU-seconds of a step.

    Raises:
        WorkerError: it failed; its output is on the console.
    """
    from megarl.artifacts.jsonl import read_jsonl
    from megarl.dag.placement import place
    from megarl.launchers.common import run_workers
    from megarl.recipes.build import build_task_graph

    config = recipe(work, settings, steps)
    placement = place(build_task_graph(config), config)
    run_dir.mkdir(parents=True)
    work.write(run_dir)
    if run_workers("local", "megarl.benchmarks.overlap.sleeping:train", config, run_dir, placement) != 0:
        raise WorkerError(f"the run with async={settings} has failed")
    lines = [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["stage"] == "train" and line["step"]]
    pushes = [line["sync/seconds"] for line in lines if "sync/seconds" in line]
    return {
        "ends_s": [line["time"] - lines[0]["time"] for line in lines],
        "push_s": sum(pushes) / len(pushes) if pushes else 0.0,
        "cpu_s": sum(line["perf/cpu_s"] for line in lines[FIRST:-LAST]) / len(lines[FIRST:-LAST]),
    }


def measure(case: str, steps: int, modes: Sequence[str], runs: Path | None = None) -> dict[str, dict[str, Any]]:
    """Measure these modes, each in a process of its own, beside their ideal pipelines; `runs`: the place of their
    folders."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="megarl-overlap-") as folder:
        file = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "megarl.benchmarks.overlap", "--case", case, "--steps", str(steps)]
        for name in modes:
            ideal = MODES[name][1]
            kept = (runs or Path(folder)) / re.sub(r"\W+", "_", name)
            _, others = run_program([*command, "--inside", str(kept), "--mode", name, "--json", str(file)])
            measured = json.loads(file.read_text())
            rate, best = steps_per_minute(measured["ends_s"]), steps_per_minute(ideal(CASES[case], steps))
            print(f"{name}: {rate:.1f} steps per minute, ideal {best:.1f}", flush=True)
            found[name] = {
                "steps_per_minute": rate,
                "ideal_steps_per_minute": best,
                "share_of_ideal": rate / best,
                "times_synchronous": rate / found.get(SYNCHRONOUS, {"steps_per_minute": rate})["steps_per_minute"],
                "others_share": others,
                **measured,
            }
    return found


def misses(case: str, modes: dict[str, dict[str, Any]]) -> list[str]:
    """List the results that are not as they should be."""
    off = [
        f"{name}: {row['share_of_ideal']:.2f} of the ideal pipeline's steps per minute, which is not within {OFF:.0%}"
        for name, row in modes.items()
        # A synchronous embedded engine stands still while environments answer, which the ideal pipeline knows not.
        if abs(row["share_of_ideal"] - 1) > OFF and (case, name) != ("environments", SYNCHRONOUS)
    ]
    slow = [
        f"{name}: {row['times_synchronous']:.2f} times the synchronous steps per minute, and {FASTER} are expected"
        for name, row in modes.items()
        if case in ("balanced", "environments") and name != SYNCHRONOUS and row["times_synchronous"] < FASTER
    ]
    return off + slow


def table(case: str, modes: dict[str, dict[str, Any]]) -> Table:
    """Return the steps per minute, measured and ideal."""
    from rich.table import Table

    others = max(row["others_share"] for row in modes.values())
    made = Table(
        title=f"overlap, {case}", caption=f"other programs, and Ray's own, took up to {others:.0%} of the machine"
    )
    for column in ("async", "steps/min", "ideal", "of ideal", "x sync", "push s", "CPU-s"):
        made.add_column(column, justify="left" if column == "async" else "right")
    for name, row in modes.items():
        made.add_row(
            name,
            f"{row['steps_per_minute']:.1f}",
            f"{row['ideal_steps_per_minute']:.1f}",
            f"{row['share_of_ideal']:.0%}",
            f"{row['times_synchronous']:.2f}",
            f"{row['push_s']:.3f}",
            f"{row['cpu_s']:.2f}",
        )
    return made


def main(argv: list[str] | None = None) -> int:
    """Run, print, save; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megarl.benchmarks.overlap", description="Running ahead, by sleeps."
    )
    parser.add_argument("--case", choices=list(CASES), default="balanced", help="which seconds samples take")
    parser.add_argument(
        "--steps", type=int, default=16, help=f"of each run; the first {FIRST} and last {LAST} count not"
    )
    parser.add_argument("--mode", choices=list(MODES), action="append", help="may be repeated (default: all)")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the run folders there, by mode")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # a run of one mode, in this process
    arguments = parser.parse_args(argv)
    if arguments.steps < FIRST + LAST + 1:
        parser.error(f"--steps {arguments.steps}: at least {FIRST + LAST + 1}, of which one counts")
    from rich.console import Console

    from megarl.benchmarks.report import save
    from megarl.machine import machine_info

    work, target = CASES[arguments.case], arguments.json
    if arguments.inside is not None:
        save(run(work, MODES[arguments.mode[0]][0], arguments.steps, arguments.inside), target)
        return 0
    modes = measure(arguments.case, arguments.steps, arguments.mode or list(MODES), arguments.runs)
    Console().print(table(arguments.case, modes))
    if target is not None:
        save({"case": arguments.case, "work": asdict(work), "machine": machine_info(), "modes": modes}, target)
    found = misses(arguments.case, modes)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
