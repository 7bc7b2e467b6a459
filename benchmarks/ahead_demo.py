"""Does a run that does not wait for generation learn as well? `python -m megarl.benchmarks.ahead_demo FOLDER`.

From one supervised model the quickstart goes on with real SGLang servers, for each seed once synchronous and once
with `grpo_async_quickstart`: the servers in a team of their own, samples taken as they get ready, weights that change
meanwhile. Both see the same number of samples. Runs that are in FOLDER are not run again. Writes FOLDER/result.json,
prints a Markdown table, and draws FOLDER/curves.svg. Takes 40 to 60 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import read_jsonl
from megarl.benchmarks.curves import curves
from megarl.benchmarks.program import run_program
from megarl.tracking.machine import machine_info

ARMS = {"synchronous": "grpo_quickstart", "asynchronous": "grpo_async_quickstart"}
COMMON = ["rollout.engine=sglang", "trainer.steps=400", "sft.steps=0", "model.hf_config=null"]
SEEDS = (1, 2, 3)


def run(folder: Path, arm: str, seed: int) -> dict[str, Any]:
    """One run in numbers, from an earlier one when it is there."""
    place = folder / f"{arm}-{seed}"
    if not (place / "hf").is_dir():
        settings = [*COMMON, f"model.path={folder / 'sft' / 'hf'}", f"trainer.seed={seed}"]
        run_megarl(["train", ARMS[arm], *settings, "--run-dir", str(place)])
    return summary([line for line in read_jsonl(place / "metrics.jsonl") if line["stage"] == "train"])


def run_megarl(arguments: Sequence[str]) -> None:
    """The command line in a process of its own."""
    print("megarl", *arguments, file=sys.stderr, flush=True)
    run_program([sys.executable, "-m", "megarl", *arguments])


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Held-out accuracy by step, and how old tokens were: the mean over steps and the largest, in steps."""
    ages = [line["rollout_corr/staleness_mean"] for line in lines if "rollout_corr/staleness_mean" in line]
    oldest = [line["rollout_corr/staleness_max"] for line in lines if "rollout_corr/staleness_max" in line]
    return {
        "accuracy": [(line["step"], line["val/acc"]) for line in lines if "val/acc" in line],
        "staleness_mean": statistics.fmean(ages) if ages else 0.0,
        "staleness_max": max(oldest, default=0.0),
    }


def table(arms: dict[str, list[dict[str, Any]]]) -> str:
    """The arms as a Markdown table."""
    rows = ["| arm | at the start | in the middle | at the end, by seed | mean | age of tokens: mean, largest |"]
    rows.append("|---" * 6 + "|")
    for name, runs in arms.items():
        accuracy = [[value for _, value in run["accuracy"]] for run in runs]
        ends = [values[-1] for values in accuracy]
        start, middle = (statistics.fmean(values[at] for values in accuracy) for at in (0, len(accuracy[0]) // 2))
        age = statistics.fmean(run["staleness_mean"] for run in runs)
        cells = [f"{start:.1%}", f"{middle:.1%}", ", ".join(f"{end:.1%}" for end in ends)]
        cells += [f"{statistics.fmean(ends):.1%}", f"{age:.1f}, {max(run['staleness_max'] for run in runs):.0f}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where runs, result.json and curves.svg go")
    folder: Path = parser.parse_args(argv).folder.resolve()
    if not (folder / "sft" / "hf").is_dir():
        run_megarl(["sft", ARMS["synchronous"], "--run-dir", str(folder / "sft")])
    arms: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for seed in SEEDS:
        for name, runs in arms.items():
            runs.append(run(folder, name, seed))
    result = {"recipes": ARMS, "common": COMMON, "arms": arms, "machine": machine_info()}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = {name: [run["accuracy"] for run in runs] for name, runs in arms.items()}
    (folder / "curves.svg").write_text(curves(lines))
    print(table(arms))


if __name__ == "__main__":
    main()
