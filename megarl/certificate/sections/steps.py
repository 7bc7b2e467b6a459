"""Measures GRPO steps of randomly initialised models: tokens/s per GPU, MFU by phase, decoding, weight updates, the
planner.

0.6B, 1.7B and 8B on all GPUs, with embedded generation and with colocated servers; on a CPU the quickstart's model.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.certificate.findings import Findings
from megarl.certificate.runs import PLAIN, RECIPE, gpu_count, planned, reason_of, sizes_of, train
from megarl.certificate.sections.performance import hardware_here
from megarl.config.engines import ENGINES
from megarl.config.load import find_recipe, load_config
from megarl.system.compat.sglang import find_python
from megarl.system.device import has_cuda
from megarl.system.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from megarl.benchmarks.measure import Step
    from megarl.planning.hardware import Hardware

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B")
_STEPS = 4  # the first step is not counted
_SETTINGS = (*PLAIN, "data.val_files=[]", f"trainer.steps={_STEPS}")  # else the last step would validate
_FULL = 0.9  # share of a GPU's memory that a layout may need by the planner's estimate
RUN_S = 1200.0  # seconds for one run; a model has one per engine


def run(found: Findings, folder: Path) -> None:
    """Train the three models of `MODELS` with every available engine; on a CPU, only the quickstart's model.

    Also copy throughputs that other projects have published into the findings, for comparison.
    """
    from megarl.benchmarks import published

    if not has_cuda():
        _measure(found, "quickstart", on_cpu(), None, folder)
        return
    kind, gpus = hardware_here(), gpu_count()
    engines = ["embedded"]
    try:
        find_python(None, cuda=True)
        engines.append("sglang")
    except ConfigError as error:
        found.skip("servers", f"no server can be started: {error.what}; fix: {error.fix}")
    for model in MODELS:
        for engine in engines:
            name = f"{model.rpartition('-')[2]} {engine}"
            overrides = fitting(model, engine, gpus, kind)
            if overrides is None:
                found.skip(name, f"no layout fits {gpus} GPUs by the planner's estimate")
            else:
                _measure(found, name, overrides, kind, folder)
    for system, trained, policy, count, theirs, *_ in published.rows([]):
        found.fact(f"published by {system}", f"{trained}, {policy}-policy, {count}: {theirs} tokens/s/GPU")


def on_cpu() -> list[str]:
    """Return the overrides of a small run on the CPU, which checks this section itself and the planner's estimates."""
    settings = [*_SETTINGS, "cluster.nproc=1", "data.batch_size=8"]
    return [*settings, "rollout.sampling={n: 4, max_new_tokens: 16, ignore_eos: true}"]


def on_gpus(model: str, engine: str, gpus: int, tp: int, memory_gb: float) -> list[str]:
    """Return the overrides of a run on all GPUs: 32 prompts x 8 samples x 512 tokens per GPU and step, two updates."""
    prompts = 32 * gpus // tp
    settings = [*_SETTINGS, f"cluster.nproc={gpus}", f"cluster.device_memory_gb={memory_gb:g}"]
    settings += ["model.dtype=bf16", f"model.hf_config={json.dumps(sizes_of(model))}", f"data.batch_size={prompts}"]
    settings += [
        "rollout.sampling={n: 8, max_new_tokens: 512, ignore_eos: true}",
        f"actor.mini_batch_size={prompts // 2}",
    ]
    settings += ["algorithm.kl={use: loss, coef: 0.001}", f"actor.parallel={{tp: {tp}, sp: {str(tp > 1).lower()}}}"]
    settings += ["actor.engine={micro_batch_tokens: 8192, offload: true}", "cluster.timeout_s=2400"]
    if ENGINES[engine].servers is not None:
        servers = (
            f"{{servers: {gpus // tp}, tp_size: {tp}, colocated: true, memory_fraction: 0.5, start_timeout_s: 1200}}"
        )
        settings += ["rollout.engine=sglang", f"rollout.sglang={servers}"]
    return settings


def fitting(model: str, engine: str, gpus: int, kind: Hardware | None) -> list[str] | None:
    """Return the overrides with the smallest tensor-parallel size that fits by the plan; None if none fits."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    for tp in (1, 2, 4, 8):
        if gpus % tp == 0:
            overrides = on_gpus(model, engine, gpus, tp, round(memory))
            try:
                full = planned(overrides, f"{kind.name}x{gpus}x1" if kind else None)["fullest device"]
            except WorkerError as error:
                print(error)
                continue
            if full <= _FULL * memory:
                return overrides
    return None


def _measure(found: Findings, name: str, overrides: list[str], kind: Hardware | None, folder: Path) -> None:
    from megarl.benchmarks.measure import steps_of
    from megarl.tracking.perf import peak_flops

    try:
        lines = train(folder / name.replace(" ", "_"), overrides, RUN_S)
    except WorkerError as error:
        print(error)
        found.check(f"{name}: runs", False, reason_of(error))
        return
    config = load_config(find_recipe(RECIPE), overrides)
    steps, gpus = steps_of(lines), config.cluster.nproc
    found.check(f"{name}: runs", len(steps) == _STEPS - 1, f"{len(steps)} counted steps")
    hardware = f"{kind.name}x{gpus}x1" if kind else None if has_cuda() else "cpu"
    expected = planned(overrides, hardware)
    device = "GPU" if has_cuda() else "process"
    source = "megarl plan"
    wall = statistics.median(step.wall_s for step in steps)
    found.figure(f"{name}: step", wall, "s", expected["step"], source)
    rate = statistics.median(step.total_tokens / step.wall_s for step in steps) / gpus
    found.figure(f"{name}: tokens", rate, f"tokens/s/{device}", expected["tokens per second and device"], source)
    for part, share in shares(config, lines[-1], steps, peak_flops(config.model.dtype) * gpus).items():
        found.figure(f"{name}: MFU of {part}", 100 * share, "%")
    for phase in steps[0].phases:
        found.figure(
            f"{name}: seconds of {phase}", statistics.median(step.phases.get(phase, 0.0) for step in steps), "s"
        )
    rate = statistics.median(step.generated_tokens / step.phases["rollout"] for step in steps) / gpus
    found.figure(f"{name}: decoding", rate, f"tokens/s/{device}")
    if "sync/seconds" in lines[-1]:
        found.figure(f"{name}: weight update", statistics.median(line["sync/seconds"] for line in lines[1:]), "s")


def shares(config: Any, line: dict[str, Any], steps: list[Step], peak: float) -> dict[str, float]:
    """Return the share of `peak` FLOP/s that whole steps, generation and training reach."""
    from megarl.benchmarks.measure import floor_of

    floor = floor_of(config, line, peak / 1e9)
    seconds = {phase: statistics.median(step.phases.get(phase, 0.0) for step in steps) for phase in steps[0].phases}
    return {
        "the step": floor.total_s / statistics.median(step.wall_s for step in steps),
        "generation": floor.rollout_s / seconds["rollout"],
        "training": floor.actor_train_s / seconds["actor_train"],
    }
