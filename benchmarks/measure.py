"""Run the real `megarl train` on a case and read back what it recorded."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import read_jsonl
from megarl.artifacts.timings import WITHIN_PHASES
from megarl.benchmarks.case import case_file, model_folder
from megarl.benchmarks.program import LIMIT_S, run_program
from megarl.config.load import load_config
from megarl.config.run import RunConfig
from megarl.recipes.components import COMPONENTS
from megarl.system.machine import available_cores
from megarl.system.processes import has_nvidia_device

WARM_UP = 1  # steps that are not counted: first use of every kernel, buffer and file


@dataclass(frozen=True)
class Step:
    """One step of the training loop.

    Attributes:
        wall_s: seconds since the previous step ended, so all of the loop is included.
        cpu_s: CPU seconds of all threads of all workers.
        phases: seconds per phase on the slowest rank, and of the parts of phases in `WITHIN_PHASES`; `other` is the
            time outside all phases.
    """

    wall_s: float
    cpu_s: float
    phases: dict[str, float]
    generated_tokens: float
    total_tokens: float
    flops: float


@dataclass(frozen=True)
class Floor:
    """The seconds that the model's matrix products need at this machine's rate, and nothing else."""

    gflops: float
    rollout_s: float
    actor_train_s: float
    total_s: float


def default_layout(config: RunConfig) -> tuple[int, int]:
    """Return (processes, threads of each): one process per device or core as far as the prompts divide evenly.

    A recipe for GPUs (`cluster.device_memory_gb`) has its own layout.
    """
    if config.cluster.device_memory_gb is not None:
        nproc, nnodes = config.cluster.nproc, config.cluster.nnodes
        return nproc, config.cluster.threads or max(1, available_cores() * nnodes // nproc)
    cores = available_cores()
    gpus = [path for path in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name)]
    most = len(gpus) if has_nvidia_device() else cores
    nproc = max(n for n in range(1, most + 1) if config.data.batch_size % n == 0)
    return nproc, max(1, cores // nproc)


def settle(
    case: str,
    *,
    dtype: str = "default",
    nproc: int | None = None,
    threads: int | None = None,
    steps: int | None = None,
    overrides: Sequence[str] = (),
) -> tuple[RunConfig, list[str]]:
    """Return the recipe that `run_case` runs with these arguments, and its overrides; the model is not created yet.

    Raises:
        UserError: `case` is unknown, or a setting is not one of a recipe.
    """
    settings = [*([] if dtype == "default" else [f"model.dtype={dtype}"]), *overrides]
    config = load_config(case_file(case), settings, components=COMPONENTS)
    chosen = default_layout(config)
    if nproc is not None:
        chosen = nproc, max(1, available_cores() // nproc)
    steps = steps or config.trainer.steps - WARM_UP
    settings += [f"cluster.nproc={chosen[0]}", f"cluster.threads={threads or chosen[1]}"]
    settings += [f"trainer.steps={steps + WARM_UP}"]
    return load_config(case_file(case), settings, components=COMPONENTS), settings


def run_case(
    case: str,
    *,
    dtype: str = "default",
    nproc: int | None = None,
    threads: int | None = None,
    steps: int | None = None,
    overrides: Sequence[str] = (),
    prefix: Sequence[str] = (),
    floor: bool = True,
    runs: Path | None = None,
    limit_s: float | None = None,
) -> dict[str, Any]:
    """Measure a case: the report as plain data, see `benchmarks/results`.

    Args:
        case: a shipped one, or a recipe file.
        dtype: fp32, bf16, or `default`: what a recipe without `model.dtype` gets.
        nproc: worker processes; None: `default_layout`.
        threads: CPU threads of each; None: the cores, shared out.
        steps: counted steps, which follow the warm-up; None: the recipe's steps less the warm-up.
        overrides: `key.path=value` of the recipe.
        prefix: command to put before the measured one, such as `numactl -N 0`.
        floor: also measure the machine's rate of matrix products and add the floor.
        runs: folder for the run folder, which all machines of the run share; None: the temporary one.
        limit_s: seconds after which the run is stopped; None: six hours.

    Raises:
        WorkerError: the run failed, or did not end within its limit; its output is in the message.
    """
    config, settings = settle(case, dtype=dtype, nproc=nproc, threads=threads, steps=steps, overrides=overrides)
    if config.model.hf_config is not None:
        settings += [f"model.path={model_folder(case)}", "model.hf_config=null", "model.tokenizer=null"]
    if runs is not None:
        runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="megarl-bench-", dir=runs) as folder:
        run_dir = Path(folder)
        command = [sys.executable, "-m", "megarl", "train", str(case_file(case)), *settings, "--run-dir", folder]
        _, others_share = run_program([*prefix, *command], limit_s=limit_s or LIMIT_S)
        lines = [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["stage"] == "train"]
        machine = json.loads((run_dir / "run.json").read_text())["machine"]
    result = {
        "case": config.name,
        "dtype": config.model.dtype,
        "overrides": list(overrides),
        "layout": {"nproc": config.cluster.nproc, "threads": config.cluster.threads},
        "machine": machine,
        "gpus": gpus_of(config) if machine["gpus"] else 0,
        "steps": [asdict(step) for step in steps_of(lines)],
        "others_share": others_share,
        "memory_gb": max(line["perf/total_memory_gb"] for line in lines),
    }
    if floor:
        gflops = machine_gflops(config.model.dtype, config.cluster.nproc, prefix)
        result["floor"] = asdict(floor_of(config, lines[-1], gflops))
    return result


def gpus_of(config: RunConfig) -> int:
    """Return the number of GPUs of a run: one per worker, and more for servers that share no GPU with a worker.

    Servers first use the GPUs of teams that only generate, if there are any.
    Servers that run already count with `tp_size` * `dp_size` GPUs each, since nothing else shows their number.
    """
    servers = config.rollout.servers
    if servers is None or servers.colocated:
        return config.cluster.nproc
    lent = sum(team.devices for team in config.placement.teams.values() if team.roles == ["rollout"])
    return config.cluster.nproc + max(0, servers.count * servers.ranks - lent)


def steps_of(lines: list[dict[str, Any]]) -> list[Step]:
    """Return the counted steps among the lines of metrics.jsonl, which hold the warm-up first."""
    steps = []
    for before, line in zip(lines[WARM_UP - 1 :], lines[WARM_UP:], strict=False):
        wall = line["time"] - before["time"]
        phases = {
            name.removeprefix("timing_s/"): seconds
            for name, seconds in line.items()
            if name.startswith("timing_s/") and name != "timing_s/step"
        }
        phases["other"] = wall - sum(spent for name, spent in phases.items() if name not in WITHIN_PHASES)
        counts = (line[f"perf/{name}"] for name in ("generated_tokens", "total_tokens", "flops"))
        steps.append(Step(wall, line["perf/cpu_s"], phases, *counts))
    return steps


def floor_of(config: RunConfig, line: dict[str, Any], gflops: float) -> Floor:
    """Return the floor of a step with this line's mean lengths, at `gflops` GFLOP/s."""
    from megarl.models.config import load_hf_config
    from megarl.models.hf import facts_of
    from megarl.planning.flops import FlopCounter

    counter = FlopCounter.of(facts_of(load_hf_config(config.model)))
    prompts, n = config.data.batch_size, config.rollout.sampling.n
    prompt, response = line["prompt_length/mean"], line["response_length/mean"]
    rollout = counter.generate([prompt] * prompts, [[response] * n] * prompts)
    train = counter.train([prompt + response] * prompts * n, head_tokens=response * prompts * n)
    rate = gflops * 1e9
    return Floor(gflops, rollout / rate, train / rate, line["perf/flops"] / rate)


def machine_gflops(dtype: str, nproc: int, prefix: Sequence[str] = ()) -> float:
    """Return the GFLOP/s of large matrix products on `nproc` GPUs, or on all cores, measured in a separate process."""
    devices = nproc if has_nvidia_device() else 1
    code = f"from megarl.planning.hardware import measure_peak; print({devices} * measure_peak({dtype!r}, seconds=2.0))"
    environment = os.environ | {"OMP_NUM_THREADS": str(available_cores())}
    command = [*prefix, sys.executable, "-c", code]
    return float(run_program(command, environment)[0]) / 1e9
