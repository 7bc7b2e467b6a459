"""`megarl bench oversample`: steps that wait for all groups, and steps that end when enough of them are complete.

    megarl bench oversample
    megarl bench oversample --steps 40

Whole runs of a tiny model, whose environment sleeps after each response: Pareto-distributed times with shape 1.5, at
least 0.1 s and at most 6 s, the same times in every run. A step trains on 8 groups of 2 samples. `rollout` and `step`
are mean seconds of the steps after the first one without the last one, `x` is how many times faster a step is, `age`
the largest number of steps between the beginning of a group and its update.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from megarl.envs import Action, Environment, Step

STEPS = 24
SHAPE, LEAST_S, MOST_S = 1.5, 0.1, 6.0
RECIPE: dict[str, Any] = {
    "name": "oversample",
    "model": {
        "hf_config": {
            "model_type": "qwen3",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "vocab_size": 20,
            "max_position_embeddings": 64,
        },
        "tokenizer": "chars:0123456789+-*/=.",
        "dtype": "fp32",
    },
    "data": {
        "train_files": ["megarl.recipes.arithmetic:make_rows"],
        "loader_kwargs": {"ops": ["+"], "low": 1, "high": 99},
        "max_prompt_tokens": 8,
        "batch_size": 8,
    },
    "env": {"name": "megarl.benchmarks.oversample:Sleeping"},
    "rollout": {"sampling": {"n": 2, "max_new_tokens": 4, "ignore_eos": True}, "ready_by": "clock"},
    "rollout_correction": {"preset": "decoupled_token_is"},
    "trainer": {"export_hf": False},
    "cluster": {"threads": 1},
    "tracking": {"mlflow": False, "report": False, "console": "quiet"},
}
#: The rows of the table: name, and keys of `rollout`.
RUNS: dict[str, dict[str, Any]] = {
    "wait for all": {},
    "oversample 1.5, carried for 1 step": {"oversample": 1.5},
    "oversample 1.5, carried for 4 steps": {"oversample": 1.5, "carry_steps": 4},
    "oversample 1.5, dropped": {"oversample": 1.5, "carry_steps": 0},
}
_numbers = itertools.count()


def response_s(number: int) -> float:
    """Return the seconds of response `number`, in the order in which the episodes of a process begin."""
    return min(MOST_S, LEAST_S * random.Random(number).paretovariate(SHAPE))


class Sleeping(Environment):
    """An environment of one turn, which sleeps and scores a response by its digits."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Return the prompt."""
        self.seconds = response_s(next(_numbers))
        return str(row["prompt"])

    async def step(self, action: Action) -> Step:
        """Sleep, and end the episode."""
        import asyncio

        await asyncio.sleep(self.seconds)
        return Step(reward=sum(map(str.isdigit, action.text)) / 4, done=True)


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and save; returns the exit code."""
    from rich.table import Table

    from megarl.benchmarks.report import show_and_save

    rows, shares = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in RUNS.items():
            row, others = measure(Path(folder), keys, arguments.steps or STEPS)
            rows.append({"run": name, **row})
            shares.append(others)
    table = Table("run", "rollout s", "step s", "x", "age", title="a sleeping environment, Pareto times")
    for row in rows:
        row["times"] = rows[0]["step_s"] / row["step_s"]
        cells = (f"{row[name]:.3g}" for name in ("rollout_s", "step_s", "times"))
        table.add_row(row["run"], *cells, f"{row['age_max']:.0f}")
    show_and_save("oversample", table, {"results": rows}, max(shares), arguments.json)
    return 0


def measure(folder: Path, keys: dict[str, Any], steps: int) -> tuple[dict[str, Any], float]:
    """Run `steps` steps with these keys of `rollout`; return mean seconds, and the share of the machine that other
    programs took."""
    from megarl.benchmarks.program import run_program

    recipe = {**RECIPE, "rollout": RECIPE["rollout"] | keys, "trainer": RECIPE["trainer"] | {"steps": steps}}
    number = len(list(folder.glob("*.yaml")))
    file, run_dir = folder / f"{number}.yaml", folder / f"run_{number}"
    file.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "megarl", "train", str(file), "--launcher", "local", "--run-dir", str(run_dir)]
    _, others = run_program(command, merged=True)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    # The first step compiles and warms up; the last one of a run that oversamples begins no further group.
    counted = [line for line in lines if line["stage"] == "train" and 1 < line["step"] < steps]
    means = {name: statistics.mean(line[f"timing_s/{name}"] for line in counted) for name in ("rollout", "step")}
    ages = [line["oversample/age/max"] for line in counted if "oversample/age/max" in line]
    return {"rollout_s": means["rollout"], "step_s": means["step"], "age_max": max(ages, default=0)}, others
