"""What SRPO's scores of failures add: `python -m megarl.benchmarks.shaping FOLDER [--recipe R] [key=value ...]`.

For each seed one policy is cloned, and trained on from there three times, with as many episodes: scored by success
(`outcome`), by how near failures came to successes (`srpo`), and by the same numbers exchanged at random between the
episodes of a task (`shuffled`). Dynamic sampling is off: it would draw more episodes for one arm than for another.

Runs that are over are not run again, and one that was interrupted goes on. Writes FOLDER/result.json and
FOLDER/curves.svg (over thousands of environment steps), prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import read_jsonl
from megarl.benchmarks.curves import curves
from megarl.benchmarks.program import run_program
from megarl.tracking.machine import machine_info

ARMS = {
    "outcome": ["robot.reward.name=success"],
    "srpo": ["robot.reward.name=progress"],
    "shuffled": ["robot.reward.name=progress", "robot.reward.srpo.shuffled=true"],
}
COMMON = ["algorithm.dynamic_sampling.enabled=false", "sft.steps=0", "model.hf_config=null", "trainer.save_every=20"]
_STEPS, _CORRELATION = "env/steps/total", "srpo/rank_correlation"


def trained(folder: Path, recipe: str, arm: str, seed: int, keys: Sequence[str]) -> dict[str, Any]:
    """One arm of a seed in numbers; cloned and trained where it is not there yet."""
    cloned, place = folder / f"cloned-{seed}", folder / f"{arm}-{seed}"
    own = [f"trainer.seed={seed}", *keys]
    if not (cloned / "hf").is_dir():
        run_megarl(["sft", recipe, *own, "--run-dir", str(cloned)])
    if not (place / "hf").is_dir():
        run_megarl(["train", recipe, *own, *COMMON, *ARMS[arm], f"model.path={cloned / 'hf'}", "--run-dir", str(place)])
    return summary([line for line in read_jsonl(place / "metrics.jsonl") if line["stage"] == "train"])


def run_megarl(arguments: Sequence[str]) -> None:
    """The command line in a process of its own."""
    print("megarl", *arguments, file=sys.stderr, flush=True)
    run_program([sys.executable, "-m", "megarl", *arguments])


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A run in numbers: held-out success by training step and by environment steps played until then (thousands),
    and the means of the rank correlations.
    """
    played = list(accumulate(line.get(_STEPS, 0) for line in lines))
    validated = [(line, steps / 1000) for line, steps in zip(lines, played, strict=True) if "val/acc" in line]
    found: dict[str, Any] = {
        "accuracy": [(line["step"], line["val/acc"]) for line, _ in validated],
        "played": [(steps, line["val/acc"]) for line, steps in validated],
        "env_steps": played[-1],
    }
    for name in ("", "/in_group"):
        values = [line[_CORRELATION + name] for line in lines if _CORRELATION + name in line]
        found[f"correlation{name}"] = statistics.fmean(values) if values else None
    return found


def first_of(curve: Sequence[tuple[float, float]], goal: float, unit: str = "") -> str:
    """Where a curve first has at least `goal`; `-`: nowhere."""
    return next((f"{place:.0f}{unit}" for place, accuracy in curve if accuracy >= goal), "-")


def table(arms: dict[str, list[dict[str, Any]]], goal: float) -> str:
    """The arms as a Markdown table; columns of several numbers have one for each seed."""
    rows = [
        f"| arm | at the start | at the end | mean of validations | training steps to {goal:.0%} | environment steps "
        "to it | of all | rank correlation, of a task | of a start state |",
        "|---" * 9 + "|",
    ]
    for name, runs in arms.items():
        start, end = (", ".join(f"{run['accuracy'][at][1]:.1%}" for run in runs) for at in (0, -1))
        mean = statistics.fmean(value for run in runs for _, value in run["accuracy"])
        steps = ", ".join(first_of(run["accuracy"], goal) for run in runs)
        until = ", ".join(first_of(run["played"], goal, "k") for run in runs)
        played = ", ".join(f"{run['env_steps'] / 1000:.0f}k" for run in runs)
        correlations = []
        for key in ("correlation", "correlation/in_group"):
            known = [run[key] for run in runs if run[key] is not None]
            correlations.append(f"{statistics.fmean(known):.2f}" if known else "-")
        rows.append(f"| {' | '.join([name, start, end, f'{mean:.1%}', steps, until, played, *correlations])} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where runs, result.json and curves.svg go")
    parser.add_argument("--recipe", default="srpo_reach_quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS), help="what is compared")
    parser.add_argument("--goal", type=float, default=0.8, help="success whose first step is told")
    given, keys = parser.parse_known_args(argv)
    if wrong := [key for key in keys if "=" not in key or key.startswith("-")]:
        parser.error(f"{wrong[0]} is no setting; they are given as key=value")
    folder: Path = given.folder.resolve()
    arms: dict[str, list[dict[str, Any]]] = {name: [] for name in given.arms}
    for seed in given.seeds:
        for name, runs in arms.items():
            runs.append(trained(folder, given.recipe, name, seed, keys))
    result = {"recipe": given.recipe, "keys": keys, "arms": arms, "machine": machine_info()}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = {name: [run["played"] for run in runs] for name, runs in arms.items()}
    (folder / "curves.svg").write_text(curves(lines))
    print(table(arms, given.goal))


if __name__ == "__main__":
    main()
