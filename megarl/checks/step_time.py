"""The time that a step and the run take by the planner's formulas, and a warning of steps that take very long."""

from __future__ import annotations

from dataclasses import replace

from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement
from megarl.planning.hardware import Hardware, typical_cpu, with_memory
from megarl.planning.passes import total
from megarl.planning.shards import Sizes
from megarl.planning.step import occupied, plan_step
from megarl.system.errors import ConfigError, duration
from megarl.system.machine import Machine

_LONG_S = 3600.0


def check_time(
    config: RunConfig,
    graph: TaskGraph | None,
    placement: Placement | None,
    sizes: Sizes,
    machine: Machine | None,
    checks: Checklist,
) -> float | None:
    """Estimate the seconds of a step, record them and those of the run, and warn when a step takes over an hour.

    Args:
        machine: None: not known, so that only the GPUs that the recipe names count.

    Returns:
        The seconds of a step; None where no formula knows them.
    """
    checks = checks.of("time")
    hardware = _hardware(config, machine)
    failed = any(check.status == "fail" for check in checks.items)
    if hardware is None or graph is None or placement is None or failed:
        return None
    if config.robot is not None or graph.has_responses:
        checks.skip(f"no formulas for {'simulators' if config.robot is not None else 'runs that generate nothing'}")
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
    run = f"{duration(steps * plan.step_s + sft)} for {'the cold start and ' if sft else ''}{steps:,} steps"
    where, parts = plan.hardware.describe(), "by formulas; megarl plan shows the parts"
    if not hardware.gpu:
        where, parts = "this CPU", "by formulas and typical rates; megarl plan measures the rates and shows the parts"
    text = f"about {_step(plan.step_s)} a step, {run} on {where}, {parts}"
    if plan.step_s <= _LONG_S:
        checks.ok(text)
    else:
        fix = "take fewer or shorter samples, more devices, or a smaller model"
        fix += "; megarl plan --search ranks layouts" if hardware.gpu else ", such as that of make smollm2"
        checks.warn("model", f"a step takes long: {text}", found=config.model.path, fix=fix)
    return plan.step_s


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
