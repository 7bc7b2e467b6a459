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

from megarl.benchmarks.program import run_program
from megarl.tracking.jsonl import read_jsonl
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
_COLOURS = ("#444444", "#c0392b", "#2471a3", "#1e8449", "#b9770e", "#7d3c98")


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


def curves(arms: dict[str, dict[str, Any]], width: int = 720, height: int = 320) -> str:
    """Held-out accuracy over steps, one line per arm, as SVG."""
    points = {name: [(int(step), value) for step, value in arm["accuracy"].items()] for name, arm in arms.items()}
    last = max(step for line in points.values() for step, _ in line) or 1
    low = min(value for line in points.values() for _, value in line)
    low = max(0.0, round(low - 0.05, 1))
    left, right, top, bottom = 50, 190, 20, 35

    def place(step: float, value: float) -> str:
        x = left + (width - left - right) * step / last
        y = top + (height - top - bottom) * (1 - (value - low) / (1 - low))
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>']  # fmt: skip
    for tick in range(round(low * 10), 11):
        x, y = map(float, place(0, tick / 10).split(","))
        parts.append(f'<path d="M{place(0, tick / 10)} L{place(last, tick / 10)}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick * 10}%</text>')
    for step in range(0, last + 1, max(1, last // 6)):
        x = float(place(step, low).split(",")[0])
        parts.append(f'<text x="{x}" y="{height - 14}" text-anchor="middle">{step}</text>')
    for number, (name, line) in enumerate(points.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " L".join(place(*point) for point in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        down = top + 18 * number + 10
        parts.append(f'<text x="{width - right + 12}" y="{down}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


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
    (folder / "curves.svg").write_text(curves(arms))
    print(table(arms))


if __name__ == "__main__":
    main()
