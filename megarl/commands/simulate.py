"""`megarl simulate`: estimate how a run spends its time, by discrete-event simulation on this machine.

    megarl simulate RECIPE --gpus 32,64,128                      # formulas: a device and its links are assumed
    megarl simulate RECIPE --run RUN_DIR                         # seconds and lengths as this run measured them
    megarl simulate RECIPE --run RUN_DIR --what-if async.max_staleness=1 --what-if link_times=4
    megarl simulate RECIPE --what-if "rollout.sglang.servers=24 placement.teams.draw.devices=24 cluster.nproc=40"
    megarl simulate RECIPE --assume device_hours=2000 --assume mean_tokens=4000

The simulation uses the run's own graph, teams, buffer rules (which groups may begin, which form a step) and times of
publishing weights. Computing and links are replaced by their seconds. docs/simulating.md lists the assumptions and
compares with real runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.system.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph
    from megarl.simulation.study import StudyRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl simulate`."""
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, the name of a shipped one, or a run folder")
    parser.add_argument("overrides", metavar="KEY.PATH=VALUE", nargs="*", help="overrides of the recipe's values")
    parser.add_argument(
        "--run", dest="run_dir", metavar="RUN_DIR", type=Path, help="a run whose measured seconds and lengths are used"
    )
    numbers = (
        "numbers of devices, such as 32,64,128: all teams and servers grow in proportion (default: the recipe's number)"
    )
    parser.add_argument("--gpus", metavar="N,N", default="", help=numbers)
    parser.add_argument(
        "--grow", action="store_true", help="let the batch grow with the devices (default: it does not)"
    )
    what_if = "add a row for the recipe with these keys or assumptions; may be repeated"
    parser.add_argument("--what-if", metavar="KEY=VALUE ...", action="append", default=[], help=what_if)
    assume = "set an assumption for all rows; may be repeated; --assumptions lists them"
    parser.add_argument("--assume", metavar="NAME=VALUE", action="append", default=[], help=assume)
    parser.add_argument(
        "--steps", metavar="N", type=int, default=100, help="steps of each simulated run (default: 100)"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of lengths and failures (default: 0)")
    parser.add_argument("--json", metavar="PATH", type=Path, help="also write the rows as JSON")
    parser.add_argument("--assumptions", action="store_true", help="print the assumptions of the formulas, and stop")


def run(arguments: argparse.Namespace, refuse: Callable[[RunConfig, TaskGraph], None]) -> int:
    """Simulate and print the result; return the exit code. `refuse` raises an error for an invalid recipe."""
    from rich.console import Console

    from megarl.simulation.planned import Assumptions
    from megarl.simulation.study import Study, as_json

    console = Console(highlight=False)
    if arguments.assumptions:
        for field in fields(Assumptions):
            console.print(f"{field.name:<18} {field.default:g}")
        return 0
    if arguments.steps < 1:
        problem = "a simulated run needs at least one step"
        raise UserError(problem, where="--steps", found=arguments.steps, allowed="1 or more")
    study = Study(
        arguments.recipe,
        tuple(arguments.overrides),
        tuple(_settings(text) for text in arguments.what_if),
        tuple(arguments.assume),
        arguments.run_dir,
        _numbers(arguments.gpus),
        arguments.grow,
        arguments.steps,
        arguments.seed,
        refuse,
    )
    rows = study.rows()
    for part in tables(rows, arguments.recipe, arguments.run_dir):
        console.print(part)
    for line in verdicts(rows):
        console.print(line)
    if other := study.other_model():
        console.print(f"warning: {other}")
    if same := study.as_measured():
        console.print(
            f"taken from the run for any number of devices: {same}. Token counts did not explain these seconds in the "
            "run, so more devices may help more than the table says"
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(as_json(rows), indent=1) + "\n")
    return 0


def _settings(text: str) -> tuple[str, ...]:
    """Split `KEY=VALUE KEY=VALUE` at spaces outside of brackets and quotes. Raise UserError if a bracket or quote is
    not closed, or a part has no `=`.
    """
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            depth += (sign in "[{") - (sign in "]}")
        if sign.isspace() and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    # Remove quotes around a whole part. Quotes inside belong to the YAML value.
    quoted = [len(part) > 1 and part[0] in "\"'" and part.find(part[0], 1) == len(part) - 1 for part in parts]
    split = tuple(part[1:-1] if whole else part for part, whole in zip(parts, quoted, strict=True) if part)
    if not split:
        raise UserError("--what-if is empty, so it sets nothing", where="--what-if", found=text, allowed="KEY=VALUE")
    if depth or quote:
        raise UserError(
            "a bracket or a quote is not closed, or not opened",
            where="--what-if",
            found=text,
            fix="add the missing one, and put the whole argument in quotes for the shell",
        )
    if wrong := [part for part in split if "=" not in part]:
        allowed = "KEY=VALUE, several separated by spaces"
        raise UserError(f"{wrong[0]!r} is not of the form KEY=VALUE", where="--what-if", found=text, allowed=allowed)
    return split


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part.strip()]
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UserError(
            "this value is not a list of numbers of devices",
            where="--gpus",
            found=text,
            allowed="numbers separated by commas, such as 32,64,128",
        )
    return tuple(int(part) for part in parts)


def tables(rows: Sequence[StudyRow], recipe: str, run_dir: Path | None) -> list[Table]:
    """Return a table for the recipe and one for each `what if`, with a row per number of devices, 80 columns wide.
    Efficiency is tokens per second and device, relative to the first row of all.
    """
    from rich.table import Table

    source = f"seconds of {run_dir}" if run_dir is not None else "seconds by formulas for H100s (--assumptions)"
    made: dict[str, Table] = {}
    for row in rows:
        shares = row.outcome.shares
        if row.what not in made:
            head = f"{recipe}: {len(row.outcome.ends)} steps, {source}\n" if not made else ""
            made[row.what] = Table(
                title=head + row.what, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False
            )
            columns = ("devices", "servers", "prompts", "step s", "tok/s", "effic.", "train", "gen.", "wait", "push")
            for column in (*columns, "store", "age"):
                made[row.what].add_column(column, justify="right", no_wrap=True)
        cells = [str(row.system.devices), str(row.system.servers), str(row.system.groups), f"{row.outcome.step_s:.3g}"]
        cells += [f"{row.outcome.tokens_per_s:.0f}", f"{row.per_device / rows[0].per_device:.0%}"]
        parts = (shares.training, shares.generating, shares.samples, shares.push, shares.coordinator)
        made[row.what].add_row(*cells, *map(_percent, parts), f"{row.outcome.staleness:.2f}")
    return list(made.values())


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def verdicts(rows: Sequence[StudyRow]) -> list[str]:
    """Return lines on the first bottleneck as devices grow, and on simulated failures."""
    from megarl.simulation.study import losses

    lines, kinds = [], {row.what: [other for other in rows if other.what == row.what] for row in rows}
    for name_of_case, same in kinds.items():
        for row in same[1:]:
            if row.per_device < 0.9 * same[0].per_device:
                lost = losses(same[0], row)
                name = max(lost, key=lost.__getitem__)
                step = f"{lost[name]:.3g} of the {row.outcome.step_s:.3g} s of a step"
                few, many = same[0].system.devices, row.system.devices
                devices = f"below 90% of the efficiency of {few} devices from {many} devices on"
                lines.append(f"{name_of_case}: {devices}, most by {name}: {step}")
                break
    for row in rows:
        servers, trainers = row.outcome.failures
        if servers or trainers:
            lines.append(f"{row.what}, {row.system.devices} devices: servers died {servers} times, trainers {trainers}")
    slowest = max(row.wall_s for row in rows)
    return [*lines, f"simulated in {sum(row.wall_s for row in rows):.1f} s, at most {slowest:.1f} s for a run"]
