"""Side by side with TRL's GRPOTrainer: `python -m megarl.benchmarks.peers.compare --case S`.

Both programs start from the same model file and tokenizer and get the same prompts in the same order, the same number
of samples at temperature 1, the same reward, and one update by the mean over tokens of the clipped loss. Runs alternate
(ours, theirs, ours, theirs, ...), since the speed of a machine drifts. Both run in fp32 and bf16 (TRL's is autocast),
each with glibc's malloc as it is and with the settings that our launcher gives its workers by default (`+malloc`).
Megarl with its defaults is compared with TRL in its best setting. TRL runs with both cores in one process. The first
step of every run is not counted.

    make bench-trl-env                                                  # TRL in an environment of its own
    python -m megarl.benchmarks.peers.compare --case M --rounds 2
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.benchmarks.case import cache_folder, case_file, model_folder
from megarl.benchmarks.measure import WARM_UP, run_case
from megarl.benchmarks.program import run_program
from megarl.benchmarks.report import host_class, save
from megarl.benchmarks.throughput import RESULTS
from megarl.config.load import load_config
from megarl.launchers.common import KEEP_FREED_MEMORY
from megarl.system.errors import MegarlError, UserError
from megarl.system.machine import available_cores, machine_info

SCRIPT = Path(__file__).parent / "trl_grpo.py"
MICRO_BATCH_SEQUENCES = 16  # the value with which TRL is fastest in case M
SETTINGS = ("fp32", "fp32+malloc", "bf16", "bf16+malloc")  # settings with which both programs are measured
Runs = dict[str, list[dict[str, Any]]]


def trl_case(case: str, dtype: str, steps: int) -> dict[str, Any]:
    """Return a case in the words of trl_grpo.py; `steps` are the counted ones."""
    from megarl.config.model import ModelConfig
    from megarl.data.prompts import PromptDataset
    from megarl.data.tokenizer import load_tokenizer

    config, model = load_config(case_file(case)), model_folder(case)
    data = PromptDataset(config.data, load_tokenizer(ModelConfig(path=str(model))), "train")
    sampling, batch = config.rollout.sampling, config.data.batch_size
    return {
        "model": str(model),
        "prompts": data.batch(range(batch * (steps + WARM_UP)))["prompt_text"],
        "prompts_per_step": batch,
        "samples_per_prompt": sampling.n,
        "max_new_tokens": sampling.max_new_tokens,
        "exact_length": sampling.ignore_eos,
        "micro_batch_sequences": MICRO_BATCH_SEQUENCES,
        "lr": config.actor.optim.lr,
        "clip_grad": config.actor.optim.clip_grad,
        "steps": steps + WARM_UP,
        "dtype": dtype,
        "threads": available_cores(),
        "seed": config.trainer.seed,
    }


def run_trl(python: Path, case: str, setting: str, steps: int, prefix: list[str]) -> dict[str, Any]:
    """Run TRL once; return `steps` (counted ones) and `memory_gb`."""
    dtype, _, malloc = setting.partition("+")
    environment = {name: value for name, value in os.environ.items() if name not in KEEP_FREED_MEMORY}
    environment |= {"OMP_NUM_THREADS": str(available_cores()), "TOKENIZERS_PARALLELISM": "false"}
    if malloc:
        environment |= KEEP_FREED_MEMORY
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "case.json", Path(folder) / "out.json"
        job.write_text(json.dumps(trl_case(case, dtype, steps)))
        _, others_share = run_program([*prefix, str(python), str(SCRIPT), str(job), str(out)], environment)
        result = json.loads(out.read_text())
    return {**result, "others_share": others_share, "steps": result["steps"][WARM_UP:]}


def alternate(arguments: argparse.Namespace, runs: Runs, say: Console) -> None:
    """Add runs by side (`megarl bf16+malloc`, `trl bf16+malloc`, ...), ours before theirs in the same setting."""
    for number in range(arguments.rounds):
        for setting in arguments.settings:
            dtype, _, malloc = setting.partition("+")
            ours = run_case(
                arguments.case,
                dtype=dtype,
                steps=arguments.steps,
                overrides=[f"cluster.keep_freed_memory={str(bool(malloc)).lower()}"],
                prefix=arguments.prefix,
                floor=False,
            )
            theirs = run_trl(arguments.trl_python, arguments.case, setting, arguments.steps, arguments.prefix)
            for side, result in ((f"megarl {setting}", ours), (f"trl {setting}", theirs)):
                runs.setdefault(side, []).append(result)
                say.print(f"round {number + 1}: {side}: {describe(result)}")


def describe(result: dict[str, Any]) -> str:
    """Describe the wall and CPU seconds of one run."""
    wall, cpu = (statistics.median(step[name] for step in result["steps"]) for name in ("wall_s", "cpu_s"))
    return f"{wall:.3f} s, {cpu:.3f} CPU-s a step (others took {result['others_share']:.0%} of the machine)"


def sides(runs: Runs) -> dict[str, dict[str, float]]:
    """Return medians over all counted steps of one program's runs, including the least and largest wall seconds."""
    made = {}
    for side, results in runs.items():
        steps = [step for result in results for step in result["steps"]]
        walls = [step["wall_s"] for step in steps]
        generation = [s["generation_s"] if "generation_s" in s else s["phases"]["rollout"] for s in steps]
        made[side] = {
            "wall_s": statistics.median(walls),
            "least_s": min(walls),
            "most_s": max(walls),
            "generation_s": statistics.median(generation),
            "cpu_s": statistics.median(step["cpu_s"] for step in steps),
            "memory_gb": max(result["memory_gb"] for result in results),
            "others_share": max(result["others_share"] for result in results),
            "steps": len(steps),
        }
    return made


def ratios(numbers: dict[str, dict[str, float]], default: str) -> dict[str, dict[str, Any]]:
    """Return our seconds over TRL's in its best setting (least wall, and least CPU, each for itself).

    Args:
        numbers: from `sides`.
        default: our default dtype. It is held against all settings of TRL, fp32 against its fp32 ones.
    """
    ratios_by_label: dict[str, dict[str, Any]] = {}
    for label, ours, theirs in (
        ("default", f"megarl {default}+malloc", "trl "),
        ("fp32", "megarl fp32+malloc", "trl fp32"),
    ):
        against = {side: value for side, value in numbers.items() if side.startswith(theirs)}
        if ours not in numbers or not against:
            continue
        ratios_by_label[label] = {"ours": ours}
        for name in ("wall_s", "cpu_s"):
            best = min(against, key=lambda side: against[side][name])
            ratios_by_label[label][name] = numbers[ours][name] / against[best][name]
            ratios_by_label[label][f"{name}_against"] = best
    return ratios_by_label


def show(case: str, numbers: dict[str, dict[str, float]], found: dict[str, dict[str, Any]], say: Console) -> None:
    """Show tables of sides and ratios."""
    table = Table(title=f"case {case}, medians per step", title_justify="left")
    for column in ("program", "s", "least - most", "generation s", "CPU-s", "GB", "others", "steps"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for side, n in numbers.items():
        spread = f"{n['least_s']:.3f} - {n['most_s']:.3f}"
        cells = [f"{n['wall_s']:.3f}", spread, f"{n['generation_s']:.3f}", f"{n['cpu_s']:.3f}", f"{n['memory_gb']:.2f}"]
        table.add_row(side, *cells, f"{n['others_share']:.0%}", str(int(n["steps"])))
    say.print(table)
    for label, ratio in found.items():
        say.print(
            f"{label}: {ratio['ours']} takes {ratio['wall_s']:.2f} of the wall seconds of {ratio['wall_s_against']} "
            f"and {ratio['cpu_s']:.2f} of the CPU-seconds of {ratio['cpu_s_against']}"
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m megarl.benchmarks.peers.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default_python = cache_folder() / "trl/bin/python"
    parser.add_argument("--case", default="S", help="S, M, or a recipe file")
    parser.add_argument("--rounds", type=int, default=2, help="times that every pair runs")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a run")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="of both programs")
    parser.add_argument("--trl-python", type=Path, default=default_python, help="interpreter of TRL's environment")
    parser.add_argument("--prefix", type=shlex.split, default=[], help="before every command, e.g. 'numactl -N 0'")
    parser.add_argument("--json", type=Path, help=f"file of the result (default: in {RESULTS})")
    parser.add_argument("--add", action="store_true", help="keep the runs that the file holds, and add to them")
    arguments = parser.parse_args(argv)
    if not arguments.trl_python.is_file():
        raise UserError(
            "interpreter not found",
            where="--trl-python",
            found=str(arguments.trl_python),
            fix="run `make bench-trl-env`, or name the Python of an environment with TRL",
        )
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run, show and save the comparison; returns the exit code."""
    say = Console(highlight=False, soft_wrap=True)
    try:
        arguments = parse(argv)
        config = load_config(case_file(arguments.case))
        machine = machine_info()
        path = arguments.json or RESULTS / f"trl-{config.name}-{host_class(machine)}.json"
        runs: Runs = json.loads(path.read_text())["runs"] if arguments.add and path.is_file() else {}
        alternate(arguments, runs, say)
    except MegarlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    numbers = sides(runs)
    our_ratios = ratios(numbers, config.model.dtype)
    show(config.name, numbers, our_ratios, say)
    save({"case": config.name, "machine": machine, "ratios": our_ratios, "sides": numbers, "runs": runs}, path)
    say.print(f"saved: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
