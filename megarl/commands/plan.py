"""`megarl plan`: estimate the time and memory of a step on some hardware, by formulas; nothing is started.

    megarl plan RECIPE                                          # on H100s, or on this CPU where the recipe is for one
    megarl plan RECIPE --hardware h200x8x4                      # kind x devices of a machine x machines, or a file
    megarl plan RECIPE --hardware h100x8x128 --search           # ranks layouts and placements that fit
    megarl plan RECIPE --search --write faster.yaml             # the best as a recipe that extends this one
    megarl plan RECIPE --assume gemm_share=0.7 actor.parallel.tp=4

Every number names its formula. docs/planning.md explains the formulas, lists the hardware, and names what the formulas
leave out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.system.errors import ConfigError, UserError, count

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph
    from megarl.planning.assumptions import PlanAssumptions
    from megarl.planning.hardware import Hardware

_SAME = 0.01  # relative difference of step times below which formulas cannot rank two plans


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl plan`."""
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file or the name of a shipped one")
    parser.add_argument("overrides", metavar="KEY.PATH=VALUE", nargs="*", help="overrides of the recipe's values")
    kinds = (
        "a100, h100, h200, b200, gb200, mi300x or cpu, or with counts as in h100x8x4: devices per machine, machines; "
        "or a YAML file (default: h100, or this CPU measured when cluster.device_memory_gb is null; as many devices "
        "as the recipe takes)"
    )
    parser.add_argument("--hardware", metavar="KIND", help=kinds)
    parser.add_argument("--search", action="store_true", help="rank layouts and placements by the time of a step")
    parser.add_argument("--top", metavar="N", type=int, help="with --search: number of rows shown (default: 10)")
    text = "with --search: write the best as a recipe that extends this one"
    parser.add_argument("--write", metavar="FILE", type=Path, help=text)
    assume = "set an assumption; may be repeated; --assumptions lists them"
    parser.add_argument("--assume", metavar="NAME=VALUE", action="append", default=[], help=assume)
    parser.add_argument("--assumptions", action="store_true", help="print the assumptions of the formulas, and stop")
    parser.add_argument("--json", action="store_true", help="print JSON, each number with its formula")


def run(arguments: argparse.Namespace) -> int:
    """Estimate a step and print it; return the exit code."""
    from megarl.checks.planned import refuse_lengths, refuse_plan
    from megarl.config.load import load_config
    from megarl.planning.assumptions import CPU, OF_ZERO, PlanAssumptions, assume, pairs
    from megarl.recipes.build import build_task_graph
    from megarl.recipes.components import COMPONENTS

    if arguments.assumptions:
        print(f"{'':<18}{'GPU':>8}{'CPU':>8}")
        for field in fields(PlanAssumptions):
            row = f"{field.name:<18}{field.default:>8g}{getattr(CPU, field.name):>8g}"
            print(f"{row}  {OF_ZERO.get(field.name, '')}".rstrip())
        return 0
    if arguments.top is not None and not arguments.search:
        raise UserError("--top needs --search", where="--top", found=arguments.top, fix="add --search")
    if arguments.top is not None and arguments.top < 1:
        raise UserError("a table needs at least one row", where="--top", found=arguments.top, allowed="1 or more")
    if arguments.write is not None and not arguments.search:
        raise UserError("--write needs --search", where="--write", found=str(arguments.write), fix="add --search")
    if arguments.write is not None and arguments.write.exists():
        raise UserError("the file already exists", where="--write", found=str(arguments.write), fix="name another one")
    config = load_config(arguments.recipe, arguments.overrides, components=COMPONENTS)
    if (problem := config.task.plan_problem()) is not None:
        raise problem
    graph = build_task_graph(config)
    if arguments.search:  # a search does not use the recipe's layout
        refuse_lengths(config, graph)
    else:
        refuse_plan(config, graph)
    hardware = choose_hardware(arguments.hardware, config, graph, search=arguments.search)
    given = assume(PlanAssumptions.of(gpu=hardware.gpu), pairs(arguments.assume))
    if arguments.search:
        return _search(arguments, config, graph, hardware, given)
    return _plan(arguments, config, graph, hardware, given)


def choose_hardware(text: str | None, config: RunConfig, graph: TaskGraph, *, search: bool) -> Hardware:
    """Return the hardware that `--hardware` names, with the recipe's number of devices if `--hardware` gives no number.
    Without `--hardware`, return the kind of GPU with the memory in `cluster.device_memory_gb`, or this CPU if that is
    not set. Raise ConfigError if the hardware is unknown, or the recipe uses a different number of devices.
    """
    from megarl.dag.placement import place
    from megarl.planning.hardware import KINDS, read_hardware, this_cpu, with_memory
    from megarl.planning.step import occupied

    cluster = config.cluster
    kind, _, counts = (text or "").partition("x")
    if kind == "cpu" or (text is None and cluster.device_memory_gb is None):
        processes, machines = counts.partition("x")[::2] if counts else (str(cluster.nproc), "1")
        if not processes.isdecimal() or not int(processes) or machines != "1":
            problem = "only this machine can be measured, with 1 or more processes"
            allowed = "cpu; or cpuxPROCESSESx1, such as cpux4x1"
            raise ConfigError(problem, where="--hardware", found=text, allowed=allowed)
        hardware, counted = this_cpu(int(processes), cluster.threads), bool(counts)
    else:
        hardware, counted = (KINDS["h100"], False) if text is None else read_hardware(text)
        if text is None and cluster.device_memory_gb is not None:
            hardware = with_memory(cluster.device_memory_gb)
    if counted and search:
        return hardware
    takes, machines_taken = occupied(config, place(graph, config)), cluster.nnodes
    if not counted:
        return replace(hardware, per_node=-(-takes // machines_taken), nodes=machines_taken)
    if (takes, machines_taken) != (hardware.devices, hardware.nodes):
        raise ConfigError(
            f"the recipe takes {takes} devices on {count(machines_taken, 'machine')}"
            + (f", {cluster.nproc} for workers and the others for servers" if takes > cluster.nproc else ""),
            where="--hardware",
            found=f"{hardware.devices} devices on {count(hardware.nodes, 'machine')}",
            allowed="as many devices as the recipe takes, or --search, which tries all ways to use them",
            fix="change placement.teams, cluster.nproc and cluster.nnodes together, or add --search"
            if config.placement.teams
            else "change cluster.nproc, cluster.nnodes and rollout.sglang.servers, change --hardware, or add --search"
            if takes > cluster.nproc
            else f"set cluster.nproc={hardware.devices} cluster.nnodes={hardware.nodes}, or add --search",
        )
    return hardware


def _plan(
    arguments: argparse.Namespace, config: RunConfig, graph: TaskGraph, hardware: Hardware, given: PlanAssumptions
) -> int:
    from rich.console import Console

    from megarl.commands.plan_report import as_json, hints, misfits, rest_of, tables
    from megarl.planning.step import model_sizes, plan_step

    sizes = model_sizes(config, graph)
    plan = plan_step(config, graph, sizes, hardware, given)
    rest = rest_of(config, plan, sizes)
    if arguments.json:
        print(json.dumps(as_json(arguments.recipe, plan, rest), indent=1))
    else:
        console = Console(highlight=False)
        for part in tables(config, arguments.recipe, plan, rest):
            console.print(part)
        for hint in hints(config, plan):
            console.print(f"hint: {hint}")
    return 2 if misfits(plan) else 0


def _search(
    arguments: argparse.Namespace, config: RunConfig, graph: TaskGraph, hardware: Hardware, given: PlanAssumptions
) -> int:
    from rich.console import Console

    from megarl.commands.plan_report import found_as_json, found_table
    from megarl.planning.search import Search
    from megarl.planning.step import model_sizes

    result = Search(config, graph, model_sizes(config, graph), hardware, given).run(arguments.top or 10)
    if arguments.write is not None:
        from megarl.commands.plan_report import write_recipe

        write_recipe(arguments.write, arguments.recipe, result.best[0])
    if arguments.json:
        print(json.dumps(found_as_json(arguments.recipe, result), indent=1))
        return 0
    Console(highlight=False).print(found_table(arguments.recipe, result))
    print(f"the recipe without changes: {_describe_recipe(config, graph, hardware, given, result.best[0].plan.step_s)}")
    if arguments.write is not None:
        print(f"wrote {arguments.write}; check it with megarl train {arguments.write} --dry-run")
    return 0


def _describe_recipe(
    config: RunConfig, graph: TaskGraph, hardware: Hardware, given: PlanAssumptions, best_s: float
) -> str:
    """Describe the unchanged recipe's step, or why it cannot run; the best plan's step takes `best_s` seconds."""
    from megarl.checks.planned import refuse_plan
    from megarl.commands.plan_report import doubts, misfits, tight
    from megarl.dag.placement import place
    from megarl.planning.step import model_sizes, occupied, plan_step

    try:
        takes, machines = occupied(config, place(graph, config)), config.cluster.nnodes
        if (takes, machines) != (hardware.devices, hardware.nodes):
            return f"for {count(takes, 'device')} on {count(machines, 'machine')}"
        refuse_plan(config, graph)
        plan = plan_step(config, graph, model_sizes(config, graph), hardware, given)
    except ConfigError as error:
        return f"it cannot run: {error.what}"
    fits = "tight" if tight(plan) else "fits"
    fits = "does not fit" if misfits(plan) else "may not fit" if doubts(plan) else fits
    if plan.step_s < best_s * (1 + _SAME) and not doubts(plan):
        fits += f"; no plan is faster by {_SAME:.0%}"
    return f"{plan.step_s:.3g} s a step, {plan.taken / 1e9:.1f} GB, {fits}"
