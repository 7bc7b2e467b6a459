"""Check that this tree trains exactly as an earlier commit did: `python tools/golden.py [--base COMMIT] [CASE ...]`

Each case is a short run of 20 steps. It is trained by the base commit and by the present tree, on this machine and with
this interpreter, and every number of the two metrics.jsonl is compared bit for bit. The base's numbers are kept in the
cache folder for each commit, machine and case, so a second call runs only the present tree. The exit code is 1 when a
number differs, and the table names the first step and metric that do, and by how much the numbers of some lines differ:
rounding begins near 1e-7 in float32 and grows with the steps, a defect begins large.

Metrics of time, speed or memory are left out: see `measures_the_machine`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.benchmarks.sources import package_of

ROOT = Path(__file__).resolve().parents[1]
BASE = "7ee42c31"
# The base's name of a metric or recipe -> its name now.
RENAMED: dict[str, str] = {}

Line = dict[str, Any]

QUIET = (
    *("trainer.steps=20", "trainer.save_every=0", "trainer.best_metric=null", "trainer.export_hf=false"),
    *("tracking.mlflow=false", "tracking.report=false", "validation.every=10"),
)
SMALL = (
    "model.hf_config.hidden_size=64",
    "model.hf_config.num_hidden_layers=2",
    "model.hf_config.head_dim=16",
    "model.hf_config.intermediate_size=128",
)
# Few sums of one digit, so that after a cold start of seconds groups have right and wrong answers.
EASY = (
    "data.loader_kwargs={low: 1, high: 6, held_out: 8}",
    *("sft.steps=60", "sft.eval_every=30", "sft.optim={lr: 3e-3, warmup_steps: 6}", "data.batch_size=16"),
)
# Two mini-batches in a step and a reference policy, so that old log-probs and the KL term affect training.
UPDATES = ("actor.mini_batch_size=8", "algorithm.kl={use: loss, coef: 0.01}", "actor.engine.micro_batch_tokens=256")
EXPERTS = (
    "model.hf_config={model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32}",
    "model.hf_config={norm_topk_prob: true, decoder_sparse_step: 1, mlp_only_layers: []}",
)
CASES: dict[str, tuple[str, ...]] = {
    "quickstart": ("grpo_quickstart", *EASY),
    "ppo": ("ppo_quickstart", *EASY, "data.batch_size=64", "actor.mini_batch_size=32", "critic.mini_batch_size=32"),
    "dapo": ("dapo_quickstart", *EASY, "data.batch_size=8", "actor.mini_batch_size=4"),
    "gsm8k_calc": (
        "grpo_gsm8k_calc",
        "data.loader_kwargs=!replace {train: EXPRESSIONS/train.jsonl, test: EXPRESSIONS/test.jsonl, invented: 100}",
        *("sft.steps=60", "sft.eval_every=60", "sft.optim={lr: 3e-3, warmup_steps: 6}", "data.batch_size=16"),
    ),
    "tp2_pp2": ("grpo_quickstart", *EASY, *UPDATES, "cluster.nproc=4", "actor.parallel={tp: 2, pp: 2}"),
    "ep2": ("grpo_quickstart", *EASY, *UPDATES, *EXPERTS, "actor.parallel.ep=2"),
    "stale_bf16": (
        *("grpo_correction_demo", *EASY, "actor.mini_batch_size=8"),
        "rollout_correction.preset=decoupled_seq_is_rs",
    ),
}


def measures_the_machine(name: str) -> bool:
    """Return whether a metric is a time, a rate or an amount of memory: timing_s/*, and perf/* without its counts."""
    if name.startswith("perf/"):
        return name != "perf/flops" and not name.endswith("_tokens")
    return name == "time" or name.startswith("timing_s/")


@dataclass(frozen=True)
class Difference:
    """The first number that is not the same; None stands for a side that does not have it."""

    where: str
    metric: str
    base: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.metric}: {self.base!r} in the base, {self.now!r} now"


def compare(base: list[Line], now: list[Line]) -> Difference | None:
    """Return the first difference of two runs in the order of the base's file; metrics of only `now` do not count."""
    for old, new in zip(base, now, strict=False):
        where = f"{old['stage']} step {old['step']}"
        for name, value in old.items():
            name = RENAMED.get(name, name)
            if not measures_the_machine(name) and _bits(value) != _bits(new.get(name)):
                return Difference(where, name, value, new.get(name))
    if len(base) != len(now):
        longer = base if len(base) > len(now) else now
        missing = longer[min(len(base), len(now))]
        return Difference(f"{missing['stage']} step {missing['step']}", "number of lines", len(base), len(now))
    return None


def differences(base: list[Line], now: list[Line]) -> dict[str, float]:
    """Return, by line, the largest difference of two runs' numbers, divided by the base's number if that is above 1;
    inf: a number is missing or NaN in one of the runs."""
    found = {}
    for old, new in zip(base, now, strict=False):
        largest = 0.0
        for name, value in old.items():
            other = new.get(RENAMED.get(name, name))
            if not measures_the_machine(name) and _bits(value) != _bits(other):
                numbers = isinstance(value, int | float) and isinstance(other, int | float)
                size = abs(value - other) / max(1.0, abs(value)) if numbers else math.inf
                largest = max(largest, math.inf if math.isnan(size) else size)
        found[f"{old['stage']} step {old['step']}"] = largest
    return found


def _bits(value: Any) -> Any:
    """Return the value that two equal values share: a NaN is one, 0.0 and -0.0 are not."""
    return float(value).hex() if isinstance(value, int | float) else value


def new_metrics(base: list[Line], now: list[Line]) -> list[str]:
    """Return the names that only the present tree writes."""
    known = {RENAMED.get(name, name) for line in base for name in line}
    return sorted({name for line in now for name in line if not measures_the_machine(name)} - known)


def train(sources: Path, case: str, folder: Path) -> list[Line]:
    """Return the lines of metrics.jsonl of one case, trained by the package in `sources`."""
    recipe, *overrides = CASES[case]
    if not (sources / "megarl/recipes" / f"{recipe}.yaml").exists():
        recipe = RENAMED[recipe]
    overrides = [text.replace("EXPRESSIONS", str(folder)) for text in (*QUIET, *SMALL, *overrides)]
    write_expressions(folder)
    command = [sys.executable, "-m", "megarl", "train", recipe, *overrides, "--run-dir", str(folder / "run")]
    environment = os.environ | {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{case} failed with the code in {sources}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def write_expressions(folder: Path) -> None:
    """Write files in the form of GSM8K's, with invented annotations, so that no case needs the network."""
    draw = random.Random(1)
    for name, count in (("train", 200), ("test", 60)):
        pairs = [(draw.randint(1, 40), draw.choice("+*"), draw.randint(1, 9)) for _ in range(count)]
        values = [(f"{a}{op}{b}", a + b if op == "+" else a * b) for a, op, b in pairs]
        rows = [{"question": "", "answer": f"<<{text}={value}>>"} for text, value in values]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def numbers_of_base(commit: str, cases: list[str]) -> dict[str, list[Line]]:
    """Return the base's lines of each case; those that are not kept yet are trained first."""
    recorded = {case: _kept(commit, case) for case in cases}
    missing = [case for case in cases if not recorded[case].exists()]
    if missing:
        with package_of(commit) as sources:
            for case in missing:
                lines, _ = _trained(sources, case, f"base {commit}")
                recorded[case].parent.mkdir(parents=True, exist_ok=True)
                recorded[case].write_text(json.dumps(lines))
    return {case: json.loads(path.read_text()) for case, path in recorded.items()}


def _kept(commit: str, case: str) -> Path:
    """Return the file of the base's lines for this processor, these libraries and this case, which change rounding."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model name", "flags"))]
    versions = [importlib.metadata.version(name) for name in ("torch", "numpy", "megatron-core", "transformers")]
    machine = _digest(platform.platform(), sys.version, *sorted(set(cpu)), *versions)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megarl/golden" / commit / machine / f"{case}-{_digest(*QUIET, *SMALL, *CASES[case])}.json"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _trained(sources: Path, case: str, label: str) -> tuple[list[Line], float]:
    """Return the lines of a case and the CPU-seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="golden") as folder:
        lines = train(sources, case, Path(folder))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"  {label}: {case} trained in {seconds:.0f} CPU-seconds", flush=True)
    return lines, seconds


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    """Train, compare, print the table; 1 when a number differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument(
        "--base", default=BASE, metavar="COMMIT", help="compare with this commit (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]}; there are {', '.join(CASES)}")
    cases = options.cases or list(CASES)
    base = numbers_of_base(_git("rev-parse", f"{options.base}^{{commit}}")[:12], cases)
    different = 0
    rows = []
    with package_of(None) as sources:
        for case in cases:
            now, seconds = _trained(sources, case, "present tree")
            difference = compare(base[case], now)
            different += difference is not None
            numbers = sum(not measures_the_machine(name) for line in base[case] for name in line)
            rows.append(f"{case:12} {numbers:7} {seconds:8.0f}  {difference or 'the same'}")
            rows += [f"{'':12} new: {name}" for name in new_metrics(base[case], now)]
            if difference is not None:
                shown = [f"{where} {size:.1e}" for where, size in differences(base[case], now).items()]
                rows.append(f"{'':12} largest difference: {', '.join(shown[:3] + shown[3::5])}")
    print("\n".join([f"{'case':12} {'numbers':>7} {'CPU-s':>8}  against {options.base}", *rows]))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
