"""The end of a run whose steps take as many prompts as they need: `trainer.epochs` counts prompts there, not steps.

`trainer.steps` is then the largest possible number of steps, that of a run whose groups are all trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.config.run import RunConfig


def prompts_used(state: Mapping[str, Any]) -> int:
    """Return how many prompts a run has generated for, from the state of a checkpoint; groups in flight do not
    count."""
    loader, carried = state["loader"], state.get("carried") or {}
    number: int = loader["epoch"] * loader["samples"] + loader["position"]
    return number - int(carried.get("groups", 0))


def epochs_end(config: RunConfig, used: int, samples: int) -> str | None:
    """Return why the passes over the prompts are over; None: they are not, or the number of steps says so.

    Args:
        used: prompts that the run has generated for.
        samples: number of training prompts.
    """
    epochs = config.trainer.epochs
    if epochs is None or not config.algorithm.dynamic_sampling.enabled or used < epochs * samples - 1e-6:
        return None
    return f"{used:,} prompts are {used / samples:.3g} epochs of {samples:,}, and trainer.epochs is {epochs:g}"
