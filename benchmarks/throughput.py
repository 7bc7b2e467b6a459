"""`megarl bench`: seconds of a training step on fixed cases, by phase, against the floor of this machine.

    megarl bench                                       # cases S and M in the default dtype
    megarl bench --case M --dtype fp32 --steps 5
    megarl bench --case S --nproc 1 --threads 2 --json s.json
    megarl bench --case M actor.engine.micro_batch_tokens=4096

Case S: 2.4M parameters, 32 prompts x 8 samples, at most 16 new tokens. Case M: 19M parameters, 16 prompts x 8 samples,
exactly 256 new tokens, one update. Each is a real run of `megarl train` in processes of its own; the first step is not
counted. The floor is the time of only the model's matrix products at the rate that a large product reaches on all
cores (or GPUs). Numbers mean something only while nothing else runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.errors import UserError

CASES = ("S", "M")
RESULTS = Path("benchmarks/results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `megarl bench`."""
    parser.add_argument(
        "--case", action="append", metavar="CASE", help="S, M, or a recipe file; may be repeated (default: S and M)"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=("default", "fp32", "bf16"),
        help="may be repeated (default: what a recipe that names none gets)",
    )
    parser.add_argument(
        "overrides",
        metavar="algorithms | sync | checkpoint | envs | KEY.PATH=VALUE",
        nargs="*",
        help="`algorithms`: the pure functions instead of training; `sync`: weights to servers; `checkpoint`: "
        "writing and reading one; `envs`: simulators; else values that replace the case's, which the result names",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="worker processes (default: one per core or GPU)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of each (default: cores, shared out)")
    parser.add_argument("--steps", type=int, metavar="N", help="counted steps (default: 10 in S, 3 in M, 500 of envs)")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help=f"folder of results, or a .json file (default: {RESULTS})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, show, and save; returns the exit code."""
    from rich.console import Console

    from megarl.benchmarks.measure import run_case
    from megarl.benchmarks.report import host_class, save, summary, table

    cases, dtypes = arguments.case or CASES, arguments.dtype or ["default"]
    target = arguments.json or RESULTS
    if target.suffix == ".json" and len(cases) * len(dtypes) > 1:
        raise UserError("one file cannot hold several results", where="--json", found=str(target), fix="name a folder")
    console = Console(highlight=False)
    for case in cases:
        for dtype in dtypes:
            result = run_case(
                case,
                dtype=dtype,
                nproc=arguments.nproc,
                threads=arguments.threads,
                steps=arguments.steps,
                overrides=arguments.overrides,
            )
            result["summary"] = summary(result)
            console.print(table(result))
            name = f"{result['case']}-{result['dtype']}-{host_class(result['machine'])}.json"
            path = target if target.suffix == ".json" else target / name
            save(result, path)
            console.print(f"saved: {path}\n")
    return 0
