"""Entry functions of each command's workers: fn(config, run_dir), called on every rank."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

from megarl.config.run import RunConfig


@contextlib.contextmanager
def _imports() -> Iterator[None]:
    """Disable garbage collection during imports, where it takes a seventh of the CPU time and frees nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # imported objects live until the end: later collections skip them
        gc.enable()


def train(config: RunConfig, run_dir: Path) -> None:
    """Run `megarl train`: the graph that `algorithm.pipeline` names, in one team or in several."""
    from megarl.recipes.build import build_task_graph

    with _imports():
        from megarl.disaggregated.loop import train as run

        graph = build_task_graph(config)
    run(config, run_dir, graph)


def sft(config: RunConfig, run_dir: Path) -> None:
    """Run `megarl sft`: supervised fine-tuning only."""
    with _imports():
        from megarl.runtime.sft import train as run
    run(config, run_dir)


def evaluate(config: RunConfig, run_dir: Path) -> None:
    """Run `megarl eval`: score the model on the held-out prompts."""
    with _imports():
        from megarl.runtime.inference import evaluate as run
    run(config, run_dir)


def generate(config: RunConfig, run_dir: Path) -> None:
    """Run `megarl generate`: write responses to the held-out prompts."""
    with _imports():
        from megarl.runtime.inference import generate as run
    run(config, run_dir)
