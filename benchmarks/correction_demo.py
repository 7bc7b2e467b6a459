"""Rollout correction at work: `python -m megarl.benchmarks.correction_demo FOLDER`.

Every arm trains the recipe `grpo_correction_demo` (generation in bf16 with weights four steps old) from the same
supervised model; the arm `no gap` generates in fp32 with the newest weights. Arms whose run is in FOLDER are not run
again. Writes FOLDER/result.json, prints a Markdown table, and draws FOLDER/curves.svg.
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

RECIPE = "grpo_correction_demo"
ARMS: dict[str, list[str]] = {
    "no gap": ["rollout.dtype=model", "rollout.stale_steps=0"],
    "disabled": [],
    "decoupled_token_is": ["rollout_correction.preset=decoupled_token_is"],
    "decoupled_seq_is_rs": ["rollout_correction.preset=decoupled_seq_is_rs"],
    "ppo_is_bypass": ["rollout_correction.preset=ppo_is_bypass"],
}
_SHOWN = ("k3_kl", "ess", "rejected", "is_truncated", "logp_diff_max", "staleness_mean")


def run_arm(folder: Path, name: str, settings: Sequence[str], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Lines of the RL stage of one arm, from an earlier run when it is there."""
    place = folder / name.replace(" ", "_")
    if not (place / "hf").is_dir():
        model = [f"model.path={folder / 'sft' / 'hf'}", "model.hf_config=null", "model.tokenizer=null", "sft.steps=0"]
        quiet = ["tracking.mlflow=false", "tracking.report=false"]
        run_megarl(["train", RECIPE, *model, *quiet, *settings, *overrides, "--run-dir", str(place)])
    return [line for line in read_jsonl(place / "metrics.jsonl") if line["stage"] == "train"]


def run_megarl(arguments: Sequence[str]) -> None:
    """The command line in a process of its own."""
    print("megarl", *arguments, file=sys.stderr, flush=True)
    run_program([sys.executable, "-m", "megarl", *arguments])


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Held-out accuracy by step, and means of the metrics over the second half of the run."""
    late = lines[len(lines) // 2 :]
    means = {name: [line[f"rollout_corr/{name}"] for line in late if f"rollout_corr/{name}" in line] for name in _SHOWN}
    return {
        "accuracy": {line["step"]: line["val/acc"] for line in lines if "val/acc" in line},
        "score": statistics.fmean(line["critic/score/mean"] for line in late if "critic/score/mean" in line),
        "grad_norm_max": max(line.get("actor/grad_norm", 0.0) for line in lines),
        **{name: statistics.fmean(values) for name, values in means.items() if values},
    }


def table(arms: dict[str, dict[str, Any]]) -> str:
    """The arms as a Markdown table."""
    columns = ["held-out accuracy: start", "middle", "end", "score", "k3 KL", "ESS", "rejected", "truncated", "age"]
    rows = [f"| arm | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, arm in arms.items():
        values = list(arm["accuracy"].values())
        accuracy = [f"{values[i]:.1%}" for i in (0, len(values) // 2, -1)]
        gap = [f"{arm['k3_kl']:.1e}", f"{arm['ess']:.3f}"]
        shares = [f"{arm[key]:.1%}" if key in arm else "-" for key in ("rejected", "is_truncated")]
        cells = [*accuracy, f"{arm['score']:.3f}", *gap, *shares, f"{arm['staleness_mean']:.1f}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def points(arm: dict[str, Any]) -> list[tuple[int, float]]:
    """Held-out accuracy by step."""
    return [(int(step), value) for step, value in arm["accuracy"].items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where runs, result.json and curves.svg go")
    parser.add_argument("overrides", nargs="*", help="key.path=value for every arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms to run and to show")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.resolve()
    if not (folder / "sft" / "hf").is_dir():
        run_megarl(["sft", RECIPE, "tracking.mlflow=false", "--run-dir", str(folder / "sft")])
    arms = {name: summary(run_arm(folder, name, ARMS[name], arguments.overrides)) for name in arguments.arms}
    result = {"recipe": RECIPE, "overrides": arguments.overrides, "arms": arms, "machine": machine_info()}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    accuracy = {name: [points(arm)] for name, arm in arms.items()}
    (folder / "curves.svg").write_text(curves(accuracy))
    print(table(arms))


if __name__ == "__main__":
    main()
