"""Opens the pool that a recipe's simulator settings describe."""

from __future__ import annotations

from megarl.robots.envs.batched_pool import BatchedPool
from megarl.robots.envs.pool import SimulatorPool
from megarl.robots.envs.settings import SimulatorSettings

#: A pool of either kind; both have the same methods.
Pool = SimulatorPool | BatchedPool


def open_pool(settings: SimulatorSettings, *, where: str = "env", cuda_device: int | None = None) -> Pool:
    """Start a simulator and return its pool: one process for each slot (one episode at a time), or with
    `settings.batched` one process with the environments of all slots.

    Args:
        where: dotted path of the recipe's section with `settings`, for messages.
        cuda_device: this rank's CUDA device, as `settings.egl_devices` numbers it; None: the rank has none.
    """
    if settings.batched:
        return BatchedPool(settings, where=where, cuda_device=cuda_device)
    return SimulatorPool(settings, where=where, cuda_device=cuda_device)
