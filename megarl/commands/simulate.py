"""`megarl simulate`: what a run would do with its time, by discrete events on this machine.

    megarl simulate RECIPE --gpus 32,64,128                      # formulas: a device and its links are assumed
    megarl simulate RECIPE --run RUN_DIR                         # seconds and lengths as this run measured them
    megarl simulate RECIPE --run RUN_DIR --what-if async.max_staleness=1 --what-if link_times=4
    megarl simulate RECIPE --what-if "rollout.sglang.servers=24 placement.teams.draw.devices=24 cluster.nproc=40"
    megarl simulate RECIPE --assume device_hours=2000 --assume mean_tokens=4000

The graph, teams, the store's rules of what may begin and which groups form a step, and when weights go are the run's
own; computing and links are seconds. docs/simulating.md says what is assumed, and how close it comes to real runs.
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
    parser.add_argument("overrides", metavar="KEY.PATH=VALUE", nargs="*", help="values that replace the recipe's")
    parser.add_argument(
        "--run", dest="run_dir", metavar="RUN_DIR", type=Path, help="a run whose seconds and lengths count"
    )
    numbers = "numbers of devices, as 32,64,128: all teams and servers grow alike (default: the recipe's)"
    parser.add_argument("--gpus", metavar="N,N", default="", help=numbers)
    parser.add_argument("--grow", action="store_true", help="the batch grows with the devices (default: it stays)")
    what_if = "a further row: the recipe with these keys, or assumptions by name; may be repeated"
    parser.add_argument("--what-if", metavar="KEY=VALUE ...", action="append", default=[], help=what_if)
    assume = "an assumption of all rows; may be repeated; --assumptions lists them"
    parser.add_argument("--assume", metavar="NAME=VALUE", action="append", default=[], help=assume)
    parser.add_argument("--steps", metavar="N", type=int, default=100, help="of each run (default: 100)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of lengths and failures (default: 0)")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the rows as JSON, too")
    parser.add_argument("--assumptions", action="store_true", help="print what formulas assume, and stop there")


def run(arguments: argparse.Namespace, refuse: Callable[[RunConfig, TaskGraph], None]) -> int:
    """Simulate and show; returns the exit code. `refuse`: raises what is wrong with a recipe."""
    from rich.console import Console

    from megarl.simulation.planned import Assumptions
    from megarl.simulation.study import Study, as_json

    console = Console(highlight=False)
    if arguments.assumptions:
        for one in fields(Assumptions):
            console.print(f"{one.name:<18} {one.default:g}")
        return 0
    if arguments.steps < 1:
        raise UserError("a run has steps", where="--steps", found=arguments.steps, allowed="1 or more")
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
            f"as the run measured it, on any number of devices: {same}. Tokens did not explain these seconds there, so "
            "that more devices may well bring more than the table says"
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(as_json(rows), indent=1) + "\n")
    return 0


def _settings(text: str) -> tuple[str, ...]:
    """Return `KEY=VALUE KEY=VALUE`, divided where it is blank outside of brackets and quotes.

    Raises:
        UserError: a bracket or a quote is not closed, or a part sets nothing.
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
    found = tuple(_unquoted(part) for part in parts if part)
    if not found:
        raise UserError("this sets nothing", where="--what-if", found=text, allowed="KEY=VALUE")
    if depth or quote:
        raise UserError("a bracket or a quote is not closed", where="--what-if", found=text)
    if wrong := [part for part in found if "=" not in part]:
        raise UserError(
            f"{wrong[0]!r} sets nothing",
            where="--what-if",
            found=text,
            allowed="KEY=VALUE, with blanks between several",
        )
    return found


def _unquoted(part: str) -> str:
    """Remove the quotes around a part that is in quotes as a whole; quotes inside of it are YAML's."""
    whole = len(part) > 1 and part[0] in "\"'" and part.find(part[0], 1) == len(part) - 1
    return part[1:-1] if whole else part


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part.strip()]
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UserError("these are no numbers of devices", where="--gpus", found=text, allowed="as in 32,64,128")
    return tuple(int(part) for part in parts)


def tables(rows: Sequence[StudyRow], recipe: str, run_dir: Path | None) -> list[Table]:
    """Return a table for the recipe and one for each `what if`, a row per number of devices: readable in 80 columns.

    Efficiency is tokens per second and device beside the first row of all.
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
    """Return what breaks first where there are several numbers of devices, and what died."""
    from megarl.simulation.study import losses

    found, kinds = [], {row.what: [one for one in rows if one.what == row.what] for row in rows}
    for what, same in kinds.items():
        for row in same[1:]:
            if row.per_device < 0.9 * same[0].per_device:
                lost = losses(same[0], row)
                name = max(lost, key=lost.__getitem__)
                step = f"{lost[name]:.3g} of the {row.outcome.step_s:.3g} s of a step are lost to it"
                devices = f"from {row.system.devices} devices on below 90% of {same[0].system.devices}"
                found.append(f"{what}: {devices}, most by {name}: {step}")
                break
    for row in rows:
        servers, trainers = row.outcome.failures
        if servers or trainers:
            found.append(f"{row.what}, {row.system.devices} devices: servers died {servers} times, trainers {trainers}")
    slowest = max(row.wall_s for row in rows)
    return [*found, f"simulated in {sum(row.wall_s for row in rows):.1f} s, at most {slowest:.1f} s for a run"]
