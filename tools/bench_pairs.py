"""Compare the CPU-seconds of a step with those of an earlier commit.

    python tools/bench_pairs.py [--base COMMIT] [--pairs N] [--json PATH] -- ARGUMENT ...
    python tools/bench_pairs.py -- --case S --dtype fp32 --steps 8
    python tools/bench_pairs.py -- algorithms --only gae grpo

What follows `--` is for `megarl bench`. The base's package and the present one are measured in turn, so that what else
happens on the machine meets both. Printed, and written as JSON, are the ratios now / base of every pair, their median,
and the interval that holds the median of such pairs with a probability of 95% (bootstrap, 10,000 draws of a fixed
seed). The exit code is 1 when the median is above 1.02 and the interval does not hold 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from golden import BASE

from megarl.benchmarks.sources import package_of

LIMIT = 1.02
DRAWS = 10_000


def measure(sources: Path, arguments: list[str]) -> dict[str, float]:
    """Return seconds that one `megarl bench` of the package in `sources` reports."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        result = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "megarl", "bench", *arguments, "--json", str(result)]
        environment = os.environ | {"PYTHONPATH": str(sources)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        # `algorithms` writes its result even if a function misses its target, for which it exits with 1
        if not result.exists():
            sys.exit(f"megarl bench failed with the code in {sources}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return seconds_of(json.loads(result.read_text()))


def seconds_of(report: dict[str, Any]) -> dict[str, float]:
    """Return CPU-seconds of a step or of each function of `algorithms`, wall seconds of each transport of `sync`."""
    if "summary" in report:
        return {"step": report["summary"]["cpu_s"]}
    if "rows" in report:
        return {row["transport"]: row["s"] for row in report["rows"]}
    return {row["case"]: row["cpu_s"] for row in report["results"] if row["cpu_s"]}


def ratio(now: dict[str, float], base: dict[str, float]) -> float:
    """Return the geometric mean of now / base over what both have measured."""
    return statistics.geometric_mean(now[name] / base[name] for name in now.keys() & base.keys())


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the interval that holds 95% of the medians of resampled pairs."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="commit to compare with")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("arguments", nargs="+", help="of `megarl bench`, after --")
    arguments = parser.parse_args()
    ratios: list[float] = []
    with package_of(arguments.base) as base, package_of(None) as now:
        for number in range(arguments.pairs):
            first, second = (base, now) if number % 2 == 0 else (now, base)
            seconds = {sources: measure(sources, arguments.arguments) for sources in (first, second)}
            ratios.append(ratio(seconds[now], seconds[base]))
            print(f"pair {number + 1}: base {sum(seconds[base].values()):.4g} s, {ratios[-1]:.4f}", flush=True)
    median, (low, high) = statistics.median(ratios), interval(ratios)
    print(f"{' '.join(arguments.arguments)}: median {median:.4f}, 95% {low:.4f} to {high:.4f}")
    if arguments.json:
        result = {"bench": arguments.arguments, "base": arguments.base, "ratios": ratios}
        text = json.dumps(result | {"median": median, "low": low, "high": high}, indent=1)
        arguments.json.write_text(text + "\n")
    return int(median > LIMIT and not low <= 1 <= high)


if __name__ == "__main__":
    sys.exit(main())
