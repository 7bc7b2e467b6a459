"""`megarl bench plan`: the planner's estimates beside the measurements of runs of `megarl train`.

    megarl bench plan                                 # 12 layouts of 3 sizes on CPU processes of one thread
    megarl bench plan --sizes 10M --layouts tp2,pp2
    megarl bench plan --kind memory                   # which a busy machine does not change
    megarl bench plan --json plan.json                # kept after every run; those that it has are not run again

Memory: the peak resident set of the largest process, minus that of the same process with a tiny model, compared with
the peak of the dry run's estimate. In these runs malloc returns freed memory to the kernel (`cluster.keep_freed_memory`
would keep it), so the resident set is the memory in use. Seconds, measured in separate runs: the median step after the
first, and CPU-seconds of all processes divided by the cores they can use, compared with `megarl plan` for this machine,
with the best rates measured before any run. Seconds are only meaningful while nothing else runs; the table has the
share of the machine that other programs took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.system.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from megarl.config.run import RunConfig

RECIPE = Path(__file__).parent / "cases" / "plan.yaml"
MEMORY_WITHIN, SECONDS_WITHIN = 0.10, 0.20
KINDS = ("memory", "seconds")
#: glibc maps blocks above 64 kB on their own and gives them back when they are freed.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}

#: Hidden width, layers, heads, dense width.
SIZES = {"10M": (256, 8, 4, 768), "30M": (384, 12, 6, 1152), "80M": (640, 12, 10, 1920)}
#: For each layout: number of processes, and the overrides that make it. Without overrides every process is a replica.
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
    """Add the arguments of `megarl bench plan` to those of `megarl bench`."""
    parser.add_argument("--sizes", metavar="NAMES", help=f"plan: some of {','.join(SIZES)}")
    parser.add_argument("--layouts", metavar="NAMES", help=f"plan: some of {','.join(LAYOUTS)}")
    parser.add_argument("--kind", choices=KINDS, help="plan: one of the two (default: both)")


def settings_of(size: str, layout: str) -> list[str]:
    """Return `key=value` of a case; a mixture has four experts of half of the width, two for each token."""
    hidden, layers, heads, width = SIZES[size]
    nproc, more = LAYOUTS[layout]
    model = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    model |= {"num_key_value_heads": 2, "intermediate_size": width}
    settings = [f"model.hf_config.{name}={value}" for name, value in model.items()]
    if layout == "ep2":
        settings += [
            f"model.hf_config.{text}" for text in ("model_type=qwen3_moe", "num_experts=4", "num_experts_per_tok=2")
        ]
        settings.append(f"model.hf_config.moe_intermediate_size={width // 2}")
    return [*settings, f"cluster.nproc={nproc}", *more]


def empty_of(nproc: int) -> list[str]:
    """Return the same for processes whose model is next to nothing."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    small |= {"head_dim": 16, "intermediate_size": 32, "vocab_size": 20}
    return [*(f"model.hf_config.{name}={value}" for name, value in small.items()), f"cluster.nproc={nproc}"]


def resident(settings: Sequence[str]) -> float:
    """Return the resident bytes of the largest process in a run of two steps.

    Raises:
        WorkerError: it failed.
    """
    given = [*settings, "trainer.steps=2", "cluster.keep_freed_memory=false"]
    lines, _ = _train(given, _GIVE_BACK | {"MALLOC_ARENA_MAX": "1"})
    return 1e9 * max(line["perf/max_memory_gb"] for line in lines)


def timed(settings: Sequence[str]) -> dict[str, Any]:
    """Return seconds of the median step after the first.

    Raises:
        WorkerError: the run failed.
    """
    from megarl.benchmarks.measure import steps_of

    lines, others = _train(settings, {})
    steps = steps_of(lines)
    return {
        "wall_s": statistics.median(step.wall_s for step in steps),
        "cpu_s": statistics.median(step.cpu_s for step in steps),
        "phases": {name: statistics.median(step.phases[name] for step in steps) for name in steps[0].phases},
        "others_share": others,
    }


def _train(settings: Sequence[str], environment: dict[str, str]) -> tuple[list[dict[str, Any]], float]:
    """Run `megarl train`; return its metrics lines, and the share of the machine that other programs took."""
    from megarl.artifacts.jsonl import read_jsonl
    from megarl.benchmarks.program import run_program

    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        command = [sys.executable, "-m", "megarl", "train", str(RECIPE), *settings, "--run-dir", folder]
        _, others = run_program(command, os.environ | environment)
        return [line for line in read_jsonl(Path(folder) / "metrics.jsonl") if line["stage"] == "train"], others


def planned(settings: Sequence[str], rates: Sequence[float], cores: int) -> dict[str, Any]:
    """Return seconds of a step and its phases by `megarl plan`, on this number of cores with these rates."""
    from megarl.config.load import load_config
    from megarl.planning.hardware import this_cpu
    from megarl.planning.step import model_sizes, plan_step
    from megarl.recipes.build import build_task_graph

    config = load_config(RECIPE, settings)
    graph = build_task_graph(config)
    hardware = this_cpu(config.cluster.nproc, config.cluster.threads, rates, cores)
    plan = plan_step(config, graph, model_sizes(config, graph), hardware)
    return {"step_s": plan.step_s, "phases": plan.seconds}


def fullest(config: RunConfig) -> tuple[str, float, dict[str, float]]:
    """Return (moment, bytes, bytes by term) of the dry run's estimate for one rank."""
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

    from megarl.benchmarks.report import result_file, save
    from megarl.system.machine import machine_info

    machine = machine_info()
    path = result_file(arguments.json, "plan", machine)
    sizes, layouts = _some(arguments.sizes, SIZES, "--sizes"), _some(arguments.layouts, LAYOUTS, "--layouts")
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"empty": {}, "cases": {}}
    result["machine"] = machine
    for kind in KINDS if arguments.kind is None else (arguments.kind,):
        for size, layout in itertools.product(sizes, layouts):
            _fill(result, kind, size, layout)
            save(result, path)
    _plan_again(result)
    save(result, path)
    Console(highlight=False, width=120).print(*(TABLES[kind](result) for kind in KINDS))
    print(f"saved: {path}")
    return 0


def _fill(result: dict[str, Any], kind: str, size: str, layout: str) -> None:
    """Measure a case, if the result does not have it; the formulas are evaluated again."""
    from megarl.config.load import load_config
    from megarl.planning.hardware import measure_cores

    settings, nproc = settings_of(size, layout), str(LAYOUTS[layout][0])
    case = result["cases"].setdefault(f"{size} {layout}", {})
    if kind == "memory":
        if nproc not in result["empty"]:
            result["empty"][nproc] = resident(empty_of(int(nproc)))
        if "resident" not in case:
            case["resident"] = resident(settings)
        moment, needed, terms = fullest(load_config(RECIPE, settings))
        case["estimate"] = {"moment": moment, "bytes": needed, "terms": terms}
        return
    if "timed" not in case:
        # Other processes can only slow a measurement down, so the fastest one describes the machine.
        result["rates"] = [max(pair) for pair in zip(measure_cores(), result.get("rates") or (0.0,) * 3, strict=True)]
        case["timed"] = timed(settings)


def _plan_again(result: dict[str, Any]) -> None:
    """Plan each timed case again, by the best rates of all."""
    from megarl.planning.hardware import measure_cores

    timed_cases = {name: case for name, case in result["cases"].items() if "timed" in case}
    if timed_cases and "rates" not in result:
        result["rates"] = list(measure_cores())
    for name, case in timed_cases.items():
        case["planned"] = planned(settings_of(*_name_of(name)), result["rates"], result["machine"]["cores"])


def _name_of(case: str) -> tuple[str, str]:
    """Return (size, layout)."""
    size, _, layout = case.partition(" ")
    return size, layout


def _some(given: str | None, known: dict[str, Any], where: str) -> list[str]:
    names = list(known) if given is None else given.split(",")
    wrong = [name for name in names if name not in known]
    if wrong:
        raise UserError("unknown case", where=where, found=", ".join(wrong), allowed=", ".join(known))
    return names


def memory_rows(result: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """Return (size, layout, bytes over those of an empty process, bytes by the estimate) of each case."""
    rows = []
    for name, case in result["cases"].items():
        if "resident" in case:
            size, layout = _name_of(name)
            more = case["resident"] - result["empty"][str(LAYOUTS[layout][0])]
            rows.append((size, layout, more, case["estimate"]["bytes"]))
    return rows


def memory_table(result: dict[str, Any]) -> Table:
    """Return the memory of the fullest process: measured, estimated, and their ratio."""
    from rich.table import Table

    every = memory_rows(result)
    near = sum(abs(estimated / measured - 1) <= MEMORY_WITHIN for _, _, measured, estimated in every)
    made = Table(title="memory of the fullest process", caption=f"within {MEMORY_WITHIN:.0%}: {near} of {len(every)}")
    for column in ("size", "layout", "measured MB", "estimate MB", "estimate / measured"):
        made.add_column(column, justify="left" if column in ("size", "layout") else "right")
    for size, layout, measured, estimated in every:
        made.add_row(size, layout, f"{measured / 1e6:.0f}", f"{estimated / 1e6:.0f}", f"{estimated / measured:.2f}")
    return made


def seconds_rows(result: dict[str, Any]) -> list[tuple[str, str, float, float, float, float]]:
    """Return each case's (size, layout, wall seconds of a step, CPU-seconds per core, planned seconds, others)."""
    rows = []
    for name, case in result["cases"].items():
        if "timed" in case:
            size, layout = _name_of(name)
            cores, seen = min(LAYOUTS[layout][0], result["machine"]["cores"]), case["timed"]
            rows.append(
                (size, layout, seen["wall_s"], seen["cpu_s"] / cores, case["planned"]["step_s"], seen["others_share"])
            )
    return rows


def seconds_table(result: dict[str, Any]) -> Table:
    """Return seconds of a step: measured, planned, and their ratio."""
    from rich.table import Table

    every = seconds_rows(result)
    ratios = [(plan / clock, plan / cpu) for _, _, clock, cpu, plan, _ in every]
    near = [sum(abs(pair[at] - 1) <= SECONDS_WITHIN for pair in ratios) for at in (0, 1)]
    caption = f"within {SECONDS_WITHIN:.0%} of the clock: {near[0]} of {len(every)}; of CPU-seconds: {near[1]}"
    made = Table(title="seconds of a step", caption=caption)
    for column in ("size", "layout", "clock", "CPU-s per core", "plan", "plan / clock", "plan / CPU", "others"):
        made.add_column(column, justify="left" if column in ("size", "layout") else "right")
    for size, layout, clock, cpu, plan, others in every:
        numbers = (clock, cpu, plan, plan / clock, plan / cpu)
        made.add_row(size, layout, *(f"{number:.2f}" for number in numbers), f"{others:.0%}")
    return made


TABLES = {"memory": memory_table, "seconds": seconds_table}
