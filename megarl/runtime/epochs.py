"""Ends a run with dynamic sampling after `trainer.epochs`. Its steps use different numbers of prompts, so the passes
over the data are counted in prompts instead of steps.

`trainer.steps` is then the largest possible number of steps, which is reached if all groups are trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.config.run import RunConfig


def prompts_used(state: Mapping[str, Any]) -> int:
    """Return for how many prompts a run has generated samples, from `state.json` of a checkpoint. Prompts whose groups
    are still in flight do not count."""
    loader, carried = state["loader"], state.get("carried") or {}
    number: int = loader["epoch"] * loader["samples"] + loader["position"]
    return number - int(carried.get("groups", 0))


def epochs_end(config: RunConfig, used: int, samples: int) -> str | None:
    """Return why `trainer.epochs` ends the run now. None: the run continues, or its number of steps ends it (without
    dynamic sampling).

    Args:
        used: number of prompts for which the run has generated samples.
        samples: number of training prompts.
    """
    epochs = config.trainer.epochs
    if epochs is None or not config.algorithm.dynamic_sampling.enabled or used < epochs * samples - 1e-6:
        return None
    return f"{used:,} prompts are {used / samples:.3g} epochs of {samples:,}, and trainer.epochs is {epochs:g}"
