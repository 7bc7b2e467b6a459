"""Tests every layout that fits the devices against one process: log-probs, losses and gradient norms of two steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megarl.certificate.findings import Findings, worst
from megarl.certificate.models import make_batch, make_engine, outputs, step
from megarl.certificate.runs import gpu_count, in_workers, write_numbers
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig

_MODELS = ("dense", "mixture")
_STEPS = 2
_LIMIT = 1e-4  # limit in float32: sums have a different order, which changes values of 1 to 10 by about 1e-6
_DEADLINE_S = 120.0


def run(found: Findings, folder: Path) -> None:
    """Compute the same numbers in one process and on all devices; on a CPU with two processes."""
    processes = gpu_count() or 2
    if processes == 1:
        found.skip("layouts", "one GPU, but a layout needs two or more")
        return
    settings = ("cluster.threads=1", f"cluster.timeout_s={_DEADLINE_S}")
    alone, together = (
        in_workers(f"{__name__}:work", [f"cluster.nproc={number}", *settings], folder / f"processes_{number}")
        for number in (1, processes)
    )
    for name, expected in alone[0].items():
        model = name.partition(" ")[0]
        for layout in together[0]:
            if layout.startswith(f"{model} "):
                for quantity, error in differences(expected, [rank[layout] for rank in together]).items():
                    found.within(f"{layout}: {quantity}", error, _LIMIT)


def differences(expected: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest differences between the results of one process and of all ranks, for samples and for steps."""
    errors: dict[str, float] = {}
    for quantity, rows in expected["samples"].items():
        samples = {name: row for rank in ranks for name, row in rank["samples"][quantity].items()}
        same = samples.keys() == rows.keys() and all(len(samples[name]) == len(row) for name, row in rows.items())
        pairs = [(a, b) for name, row in rows.items() for a, b in zip(row, samples[name], strict=True)] if same else []
        errors[quantity] = worst(abs(a - b) for a, b in pairs) if same else float("inf")
    for quantity in expected["steps"][0]:
        errors[quantity] = worst(
            abs(ours[quantity] - theirs[quantity]) / max(abs(theirs[quantity]), 1.0)
            for rank in ranks
            for ours, theirs in zip(rank["steps"], expected["steps"], strict=True)
        )
    return errors


def layouts_of(processes: int) -> Iterator[tuple[str, ParallelConfig]]:
    """Yield (name, layout) of each model for `processes` processes, which are data parallel beyond this layout."""
    if processes == 1:
        yield from ((model, ParallelConfig()) for model in _MODELS)
        return
    sizes: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}]
    sizes += [{"ep": 2}, {"ep": 4}, {"ep": 8}, {"ep": 2, "etp": 2}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}]
    sizes += [{"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2}, {"tp": 2, "cp": 2, "sp": True}, {"tp": 2, "pp": 2, "cp": 2}]
    for model in _MODELS:
        for layout_sizes in sizes:
            layout = ParallelConfig(**layout_sizes)
            experts = layout.ep * layout.expert_tp * layout.pp if layout.ep > 1 else 1
            heads = layout.tp <= 2  # the models have two key and value heads, too few for a larger tp
            fits = processes % layout.model_parallel_size == 0 and processes % experts == 0 and heads
            if fits and (model == "mixture" or layout.ep == 1):
                yield (
                    f"{model} {' '.join(f'{key} {value}' for key, value in layout_sizes.items()) or 'dp only'}",
                    layout,
                )


def work(config: RunConfig, run_dir: Path) -> None:
    """Write this rank's log-probs and entropies, and the metrics of its steps, under every layout. Runs in each
    worker.
    """
    from megarl.runtime.setup import init_processes
    from megarl.training.parallel import init_parallel

    first, results = init_processes(config, run_dir, ParallelConfig()), {}
    world = first.world
    first.close()
    for name, parallel in layouts_of(world.size):
        layout = init_parallel(parallel, world)
        engine = make_engine(name.partition(" ")[0], layout, torch.float32)
        whole = make_batch()
        batch = whole.select(list(range(layout.dp_rank, len(whole), layout.dp_size)))
        lengths = batch["response_ids"].lengths.tolist()
        numbers = {
            quantity: dict(zip(batch["sample_id"], (row.tolist() for row in values.cpu().split(lengths)), strict=True))
            for quantity, values in outputs(engine, batch).items()
        }
        results[name] = {"samples": numbers, "steps": [step(engine, batch) for _ in range(_STEPS)]}
        layout.close()
    write_numbers(run_dir, world.rank, results)
