"""`megarl bench plan`: what the formulas of the planner say, and what a run of `megarl train` takes, side by side.

    megarl bench plan                                 # 12 layouts of 3 sizes on CPU processes of one thread
    megarl bench plan --sizes 10M --layouts tp2,pp2
    megarl bench plan --json plan.json                # kept after every run; those that it has are not run again

Memory: the peak resident set of the fullest process, less that of the same processes with a model of next to nothing,
beside the fullest moment of the dry run's estimate. Seconds: the median step after the first, and CPU-seconds of all
processes over the cores they can use, beside `megarl plan` with this machine measured. Seconds mean something only
while nothing else runs; others' share of the machine is in the table. Memory does not mind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from megarl.config.run import RunConfig

RECIPE = Path(__file__).parent / "cases" / "plan.yaml"
MEMORY_WITHIN, SECONDS_WITHIN = 0.10, 0.20

#: Hidden width, layers, heads, dense width.
SIZES = {"10M": (256, 8, 4, 768), "30M": (384, 12, 6, 1152), "80M": (640, 12, 10, 1920)}
#: Processes, and what differs from one replica per process.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "1": (1, ()),
    "1 recompute": (1, ("actor.engine.recompute=full",)),
    "dp2": (2, ()),
    "dp2 whole optimizer": (2, ("actor.engine.distributed_optimizer=false",)),
    "tp2": (2, ("actor.parallel.tp=2",)),
    "tp2 sp": (2, ("actor.parallel.tp=2", "actor.parallel.sp=true")),
    "pp2": (2, ("actor.parallel.pp=2",)),
    "pp2 vpp2": (2, ("actor.parallel.pp=2", "actor.parallel.vpp=2")),
    "cp2": (2, ("actor.parallel.cp=2",)),
    "ep2": (2, ("actor.parallel.ep=2",)),
    "tp2 dp2": (4, ("actor.parallel.tp=2",)),
    "tp2 pp2": (4, ("actor.parallel.tp=2", "actor.parallel.pp=2")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `megarl bench plan`, added to those of `megarl bench`."""
    parser.add_argument("--sizes", metavar="NAMES", help=f"plan: some of {','.join(SIZES)}")
    parser.add_argument("--layouts", metavar="NAMES", help=f"plan: some of {','.join(LAYOUTS)}")


def settings_of(size: str, layout: str) -> list[str]:
    """`key=value` of a case; a mixture has four experts of a quarter of the width, two for each token."""
    hidden, layers, heads, width = SIZES[size]
    nproc, more = LAYOUTS[layout]
    model = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    model |= {"num_key_value_heads": heads // 2, "intermediate_size": width}
    found = [f"model.hf_config.{name}={value}" for name, value in model.items()]
    if layout == "ep2":
        found += [f"model.hf_config.{text}" for text in ("model_type=qwen3_moe", "num_experts=4", "num_experts_per_tok=2")]
        found.append(f"model.hf_config.moe_intermediate_size={width // 2}")
    return [*found, f"cluster.nproc={nproc}", *more]


def empty_of(nproc: int) -> list[str]:
    """The same for processes whose model is next to nothing."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    small |= {"head_dim": 16, "intermediate_size": 32, "vocab_size": 20}
    return [*(f"model.hf_config.{name}={value}" for name, value in small.items()), f"cluster.nproc={nproc}"]


def measured(settings: Sequence[str]) -> dict[str, Any]:
    """Run `megarl train`: memory in bytes of the fullest process, and what each counted step took.

    Raises:
        WorkerError: it failed.
    """
    from megarl.artifacts.jsonl import read_jsonl
    from megarl.benchmarks.measure import steps_of
    from megarl.benchmarks.program import run_program

    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        command = [sys.executable, "-m", "megarl", "train", str(RECIPE), *settings, "--run-dir", folder]
        _, others = run_program(command)
        lines = [line for line in read_jsonl(Path(folder) / "metrics.jsonl") if line["stage"] == "train"]
    steps = steps_of(lines)
    return {
        "memory": 1e9 * max(line["perf/max_memory_gb"] for line in lines),
        "wall_s": statistics.median(step.wall_s for step in steps),
        "cpu_s": statistics.median(step.cpu_s for step in steps),
        "phases": {name: statistics.median(step.phases[name] for step in steps) for name in steps[0].phases},
        "others_share": others,
    }


def predicted(settings: Sequence[str]) -> dict[str, Any]:
    """What the formulas say: bytes of the fullest moment by term, and seconds by phase."""
    from megarl.config.load import load_config
    from megarl.planning.hardware import this_cpu
    from megarl.planning.step import model_sizes, plan_step
    from megarl.recipes.build import build_task_graph

    config = load_config(RECIPE, settings)
    graph = build_task_graph(config)
    plan = plan_step(config, graph, model_sizes(config, graph), this_cpu(config.cluster.nproc, 1))
    peak = fullest(config)
    return {
        "memory": peak[1],
        "moment": peak[0],
        "terms": peak[2],
        "step_s": plan.step_s,
        "phases": plan.seconds,
    }


def fullest(config: RunConfig) -> tuple[str, float, dict[str, float]]:
    """(moment, bytes, bytes by term) of the dry run's estimate for one rank."""
    from megarl.dag.placement import place
    from megarl.planning.memory import device_memory
    from megarl.planning.step import model_sizes
    from megarl.recipes.build import build_task_graph

    graph = build_task_graph(config)
    (team,) = place(graph, config).teams
    peak = device_memory(config, model_sizes(config, graph), team, gpu=False).peak
    return peak.name, peak.bytes, {part.what: part.bytes for part in peak.terms}


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and save; returns the exit code."""
    from rich.console import Console

    from megarl.benchmarks.report import host_class, save
    from megarl.benchmarks.throughput import RESULTS
    from megarl.tracking.machine import machine_info

    machine = machine_info()
    target = arguments.json or RESULTS
    path = target if target.suffix == ".json" else target / f"plan-{host_class(machine)}.json"
    sizes, layouts = _some(arguments.sizes, SIZES, "--sizes"), _some(arguments.layouts, LAYOUTS, "--layouts")
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"empty": {}, "cases": {}}
    result["machine"] = machine
    for nproc in sorted({LAYOUTS[layout][0] for layout in layouts}):
        if str(nproc) not in result["empty"]:
            result["empty"][str(nproc)] = measured(empty_of(nproc))
            save(result, path)
    for size in sizes:
        for layout in layouts:
            name = f"{size} {layout}"
            kept = result["cases"].get(name, {}).get("measured")
            settings = settings_of(size, layout)
            result["cases"][name] = {"measured": kept or measured(settings), "predicted": predicted(settings)}
            save(result, path)
    Console(highlight=False, width=120).print(table(result), summary(result))
    print(f"saved: {path}")
    return 0


def _some(given: str | None, known: dict[str, Any], where: str) -> list[str]:
    names = list(known) if given is None else given.split(",")
    wrong = [name for name in names if name not in known]
    if wrong:
        raise UserError("there is no such case", where=where, found=", ".join(wrong), allowed=", ".join(known))
    return names


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per case: bytes over the empty processes, and seconds, with their ratios."""
    found = []
    for name, case in result["cases"].items():
        size, _, layout = name.partition(" ")
        nproc = LAYOUTS[layout][0]
        seen, said = case["measured"], case["predicted"]
        memory = seen["memory"] - result["empty"][str(nproc)]["memory"]
        cores = min(nproc, result["machine"]["cores"])
        found.append(
            {
                "size": size,
                "layout": layout,
                "memory": memory,
                "memory_said": said["memory"],
                "memory_ratio": said["memory"] / memory,
                "wall_s": seen["wall_s"],
                "cpu_s": seen["cpu_s"] / cores,
                "said_s": said["step_s"],
                "wall_ratio": said["step_s"] / seen["wall_s"],
                "cpu_ratio": said["step_s"] / (seen["cpu_s"] / cores),
                "others_share": seen["others_share"],
            }
        )
    return found


def table(result: dict[str, Any]) -> Table:
    """Said, measured, and said over measured."""
    from rich.table import Table

    made = Table(title="formulas / measured", title_justify="left")
    for column in ("size", "layout", "MB", "said", "ratio", "step s", "CPU-s/core", "said", "ratio", "of CPU", "others"):
        made.add_column(column, justify="left" if column in ("size", "layout") else "right")
    for row in rows(result):
        made.add_row(
            row["size"],
            row["layout"],
            *(f"{row[name] / 1e6:.0f}" for name in ("memory", "memory_said")),
            f"{row['memory_ratio']:.2f}",
            *(f"{row[name]:.2f}" for name in ("wall_s", "cpu_s", "said_s", "wall_ratio", "cpu_ratio")),
            f"{row['others_share']:.0%}",
        )
    return made


def summary(result: dict[str, Any]) -> str:
    """How many cases lie within the bounds."""
    every = rows(result)
    memory = sum(abs(row["memory_ratio"] - 1) <= MEMORY_WITHIN for row in every)
    wall, cpu = (sum(abs(row[name] - 1) <= SECONDS_WITHIN for row in every) for name in ("wall_ratio", "cpu_ratio"))
    return (
        f"of {len(every)} cases: memory within {MEMORY_WITHIN:.0%} in {memory}; a step within {SECONDS_WITHIN:.0%} of "
        f"the clock in {wall}, of CPU-seconds in {cpu}"
    )
