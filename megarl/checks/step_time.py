"""Estimates the time of a step and of the run by the planner's formulas, and warns of very long steps."""

from __future__ import annotations

from dataclasses import replace

from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement
from megarl.dag.stage import Role
from megarl.planning.hardware import Hardware, typical_cpu, with_memory
from megarl.planning.passes import total
from megarl.planning.shards import Sizes
from megarl.planning.step import occupied, plan_step, plan_supervised_step
from megarl.system.errors import ConfigError, duration
from megarl.system.machine import Machine

_LONG_S = 3600.0
_SMALLER = ", such as that of make smollm2"


def check_time(
    config: RunConfig,
    graph: TaskGraph | None,
    placement: Placement | None,
    sizes: Sizes,
    machine: Machine | None,
    checks: Checklist,
    job: str = "train",
) -> float | None:
    """Estimate, record and return the seconds of a step (None without a formula), with a warning above an hour."""
    checks = checks.of("time")
    hardware = _hardware(config, machine)
    failed = any(check.status == "fail" for check in checks.items)
    if hardware is None or placement is None or failed:
        return None
    if job == "sft":
        return _check_supervised(config, placement, sizes[Role.ACTOR], hardware, checks)
    if graph is None:
        return None
    if not config.task.writes_text or graph.has_responses:
        checks.skip(f"no formulas for {'runs that generate nothing' if config.task.writes_text else 'simulators'}")
        return None
    if any(size is None for size in (sizes.get(role) for role in graph.roles if role in sizes)):
        checks.skip("the model's sizes are not known here")
        return None
    nodes = config.cluster.nnodes
    per_node = -(-occupied(config, placement) // nodes)
    try:
        plan = plan_step(config, graph, sizes, replace(hardware, per_node=per_node, nodes=nodes))
    except ConfigError as error:
        checks.skip(f"no plan: {error.what}")
        return None
    steps, sft = config.trainer.steps, config.sft.steps * total(plan.sft)
    run = f", {duration(steps * plan.step_s + sft)} for {'the cold start and ' if sft else ''}{_steps(steps)}"
    run = "" if config.uncounted else run
    where, parts = plan.hardware.describe(), "by formulas; megarl plan shows the parts"
    if not hardware.gpu:
        where, parts = "this CPU", "by formulas and typical rates; megarl plan measures the rates and shows the parts"
    fix = "use fewer or shorter samples, more devices, or a smaller model"
    fix += "; megarl plan --search ranks layouts" if hardware.gpu else _SMALLER
    _record(config, plan.step_s, f"about {_step(plan.step_s)} a step{run} on {where}, {parts}", fix, checks)
    return plan.step_s


def _check_supervised(
    config: RunConfig, placement: Placement, facts: ModelFacts | None, hardware: Hardware, checks: Checklist
) -> float | None:
    """Record the seconds of a step of `megarl sft` and of the run; return the seconds of a step, or None without a
    formula.
    """
    if not config.task.writes_text or facts is None:
        checks.skip("no formulas for simulators" if facts is not None else "the model's sizes are not known here")
        return None
    nodes, devices = config.cluster.nnodes, sum(team.devices for team in placement.teams)
    try:
        step_s = plan_supervised_step(
            config, placement, facts, replace(hardware, per_node=-(-devices // nodes), nodes=nodes)
        )
    except ConfigError as error:
        checks.skip(f"no plan: {error.what}")
        return None
    where = hardware.describe() if hardware.gpu else "this CPU"
    steps = config.sft.steps
    run = "" if config.uncounted else f", {duration(steps * step_s)} for {_steps(steps)}"
    text = (
        f"about {_step(step_s)} a step{run} on {where}, by formulas, of examples as long as data.max_prompt_tokens and "
        "rollout.sampling let samples be"
    )
    fix = f"set a smaller sft.batch_size, more devices, or a smaller model{'' if hardware.gpu else _SMALLER}"
    _record(config, step_s, text, fix, checks)
    return step_s


def _record(config: RunConfig, step_s: float, text: str, fix: str, checks: Checklist) -> None:
    if step_s <= _LONG_S:
        checks.ok(text)
    else:
        checks.warn("model", f"a step takes long: {text}", found=config.model.path, fix=fix)


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number:,} steps"


def _step(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _hardware(config: RunConfig, machine: Machine | None) -> Hardware | None:
    """Return a device of the run: the GPU that the recipe names, this machine's GPU, or a share of its cores."""
    cluster = config.cluster
    if cluster.device_memory_gb is not None:
        return with_memory(cluster.device_memory_gb)
    if machine is None or (machine.has_gpu and machine.gpu_memory is None):
        return None
    if machine.gpu_memory is not None:
        return with_memory(round(machine.gpu_memory / 1e9))
    return typical_cpu(-(-cluster.nproc // cluster.nnodes), cluster.threads, machine.cores)
