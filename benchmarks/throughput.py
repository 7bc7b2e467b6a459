"""`megarl bench`: seconds of a training step on fixed cases, by phase, against the floor of this machine.

    megarl bench                                       # cases S and M in the default dtype
    megarl bench --case M --dtype fp32 --steps 5
    megarl bench --case S --nproc 1 --threads 2 --json s.json
    megarl bench --case M actor.engine.micro_batch_tokens=4096

Case S: 2.4M parameters, 32 prompts x 8 samples, at most 16 new tokens. Case M: 19M parameters, 16 prompts x 8 samples,
exactly 256 new tokens, one update. Each is a real run of `megarl train` in processes of its own; the first step is not
counted. The floor is the time of only the model's matrix products at the rate that a large product reaches on all
cores (or GPUs). Numbers are meaningful only while nothing else runs.

    megarl bench --compare                             # rounds, beside the last ones and the baseline of the history
    megarl bench --compare --set-baseline              # later ones are held against this one
    megarl bench --compare --base main --rounds 10     # this tree and a commit in turn: the sharpest comparison

    megarl bench --matrix cpu                          # every combination of named settings, in turn
    megarl bench --matrix h100x16 --runs /shared/bench # on GPUs, beside published figures
    megarl bench --matrix h100x16 --dry-run            # which combinations would run

Exit code 1: a case is slower beyond the noise that was measured (--compare), or a combination has failed (--matrix).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.system.errors import UserError

CASES = ("S", "M")
RESULTS = Path("runs/bench")
HISTORY = Path("benchmarks/history.jsonl")
MATRICES = Path(__file__).parent / "matrices"


def matrix_names() -> list[str]:
    """Return the matrices that are shipped."""
    return sorted(file.stem for file in MATRICES.glob("*.yaml"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl bench`."""
    parser.add_argument(
        "--case",
        action="append",
        metavar="CASE",
        help="of benchmarks/cases, a shipped recipe, or a file; repeatable (default: S, M)",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=("default", "fp32", "bf16"),
        help="may be repeated (default: what a recipe that names none gets)",
    )
    parser.add_argument(
        "overrides",
        metavar="algorithms | sync | checkpoint | envs | plan | KEY.PATH=VALUE",
        nargs="*",
        help="`algorithms`: the pure functions instead of training; `sync`: weights to servers; `checkpoint`: "
        "writing and reading one; `envs`: simulators; `plan`: the planner's formulas; else values that replace the "
        "case's, which the result names",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="worker processes (default: one per core or GPU)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of each (default: cores, shared out)")
    parser.add_argument("--steps", type=int, metavar="N", help="counted steps (default: 10 in S, 3 in M, 500 of envs)")
    limit = "seconds after which a run is stopped (default: six hours, or the matrix's)"
    parser.add_argument("--limit-s", type=float, metavar="S", help=limit)
    runs = "folder for the run folders, which all machines of a run share (default: a temporary one)"
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help=runs)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help=f"folder of results, or a .json file (default: {RESULTS})"
    )


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl bench --compare`, see megarl.benchmarks.history."""
    parser.add_argument("--compare", action="store_true", help="measure in rounds, and beside the history (see above)")
    matrices = f"combinations of settings: {', '.join(matrix_names())}, or a file"
    parser.add_argument("--matrix", metavar="MATRIX", help=matrices)
    parser.add_argument("--dry-run", action="store_true", help="with --matrix: list the combinations; run nothing")
    rounds = "of --compare and --matrix (default: 5, or the matrix's)"
    parser.add_argument("--rounds", type=int, metavar="N", help=rounds)
    parser.add_argument("--base", metavar="COMMIT", help="with --compare: measure this commit in turn with the tree")
    parser.add_argument("--set-baseline", action="store_true", help="later comparisons are held against this one")
    parser.add_argument(
        "--history", type=Path, metavar="PATH", default=HISTORY, help=f"JSON lines of all rounds (default: {HISTORY})"
    )
    parser.add_argument(
        "--page", type=Path, metavar="PATH", help="page with matrix and history (default: beside the history)"
    )


def _check(arguments: argparse.Namespace) -> None:
    for option in ("nproc", "threads", "steps", "rounds", "limit_s"):
        value = getattr(arguments, option)
        if value is not None and value <= 0:
            where = f"--{option.replace('_', '-')}"
            raise UserError("the value must be positive", where=where, found=value, allowed="above 0")
    if arguments.base is not None and not arguments.compare:
        raise UserError(
            "--base has an effect only in a comparison", where="--base", found=arguments.base, fix="add --compare"
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure, show, and save; returns the exit code."""
    _check(arguments)
    if arguments.dry_run and arguments.matrix is None:
        raise UserError(
            "--dry-run lists the combinations of a matrix, but none is named",
            where="--dry-run",
            fix="add --matrix; for a single case: megarl train CASE --dry-run",
        )
    if arguments.compare or arguments.matrix is not None:
        from megarl.benchmarks.history import compare

        return compare(arguments)
    from rich.console import Console

    from megarl.benchmarks.measure import run_case
    from megarl.benchmarks.report import result_file, save, summary, table

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
                runs=arguments.runs,
                limit_s=arguments.limit_s,
            )
            result["summary"] = summary(result)
            console.print(table(result))
            path = result_file(target, f"{result['case']}-{result['dtype']}", result["machine"])
            save(result, path)
            console.print(f"saved: {path}\n")
    return 0
