"""The numbers of a benchmark as a table and as a file."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.benchmarks.throughput import RESULTS
from megarl.system.machine import machine_info


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Return the medians over the counted steps of `megarl.benchmarks.measure.run_case`, and what follows from them.

    `times_floor` is wall seconds over the floor; `mfu`, its inverse, the share of the machine's matrix-product rate;
    `tokens_per_s` counts prompts and responses of all samples, and all seconds of a step.
    """
    steps, floor = result["steps"], result["floor"]
    wall = median(steps, "wall_s")
    flops = median(steps, "flops")
    return {
        "wall_s": wall,
        "cpu_s": median(steps, "cpu_s"),
        "tokens_per_s": median(steps, "total_tokens") / wall,
        "memory_gb": result["memory_gb"],
        "floor_s": floor["total_s"],
        "times_floor": wall / floor["total_s"],
        "mfu": flops / wall / (floor["gflops"] * 1e9),
    }


def median(steps: list[dict[str, Any]], name: str) -> float:
    """Return the median over steps of a number."""
    return statistics.median(step[name] for step in steps)


def phase_medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds by phase, in the order of the step."""
    return {name: statistics.median(step["phases"].get(name, 0.0) for step in steps) for name in steps[0]["phases"]}


def table(result: dict[str, Any]) -> Table:
    """Return a table of seconds per phase, each of its slowest rank, beside the floor, and of the whole step."""
    made = Table(title=headline(result), caption=caption(result), title_justify="left", caption_justify="left")
    for column in ("phase", "s", "share", "floor s", "x floor"):
        made.add_column(column, justify="left" if column == "phase" else "right")
    numbers, floor = summary(result), result["floor"]
    for name, seconds in phase_medians(result["steps"]).items():
        made.add_row(name, *_cells(seconds, numbers["wall_s"], floor.get(f"{name}_s")))
    made.add_section()
    made.add_row("step", *_cells(numbers["wall_s"], numbers["wall_s"], floor["total_s"]))
    return made


def _cells(seconds: float, wall: float, floor: float | None) -> list[str]:
    cells = [f"{seconds:.3f}", f"{seconds / wall:.0%}"]
    return cells + (["", ""] if floor is None else [f"{floor:.3f}", f"{seconds / floor:.2f}"])


def headline(result: dict[str, Any]) -> str:
    """Return case, dtype, layout and overrides as the title of a table."""
    layout = result["layout"]
    made = f"{result['case']} {result['dtype']}, {layout['nproc']} processes x {layout['threads']} threads"
    return " ".join([made, *result["overrides"]])


def caption(result: dict[str, Any]) -> str:
    """Return the totals of a step in words."""
    numbers = summary(result)
    return (
        f"median of {len(result['steps'])} steps: {numbers['cpu_s']:.2f} CPU-s, "
        f"{numbers['tokens_per_s']:.0f} tokens/s, MFU {numbers['mfu']:.1%}, "
        f"peak {numbers['memory_gb']:.2f} GB over all workers; "
        f"other programs took {result['others_share']:.0%} of the machine; "
        f"floor: matrix products at {result['floor']['gflops']:.0f} GFLOP/s"
    )


def host_class(machine: dict[str, Any]) -> str:
    """Return the name that all machines of one kind share, for file names: `8x-nvidia-h100`, `2x-amd-epyc-9b45`."""
    name = (
        machine["gpus"][0]
        if machine["gpus"]
        else re.sub(r"\(R\)|\(TM\)|\d+-Core|Processor|CPU|@.*", "", machine["processor"])
    )
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{len(machine['gpus']) or machine['cores']}x-{slug}"


def result_file(target: Path | None, name: str, machine: dict[str, Any]) -> Path:
    """Return the file for a result: `target` itself where it ends in .json, else one of this name and machine in it."""
    folder = target or RESULTS
    return folder if folder.suffix == ".json" else folder / f"{name}-{host_class(machine)}.json"


def show_and_save(name: str, shown: Table, result: dict[str, Any], others_share: float, target: Path | None) -> None:
    """Print a table and the others' share of the machine, and save the result with both (see `result_file`)."""
    console, machine = Console(highlight=False), machine_info()
    console.print(shown, f"other programs took up to {others_share:.0%} of the machine")
    path = result_file(target, name, machine)
    save({"machine": machine, **result, "others_share": others_share}, path)
    console.print(f"saved: {path}")


def save(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON, with a line for each object or list that contains no other one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_as_json(result) + "\n")


def _as_json(value: Any, newline: str = "\n") -> str:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if not any(isinstance(part, dict | list | tuple) for part in parts):
        return json.dumps(value)
    deeper = f"{newline} "
    lines = [_as_json(part, deeper) for part in parts]
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(key))}: {line}" for key, line in zip(value, lines, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}{deeper}{f',{deeper}'.join(lines)}{newline}{closing}"
