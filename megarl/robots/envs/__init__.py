"""Runs robots' simulators in separate processes, each with its own Python interpreter."""

from megarl.robots.envs.answers import Advice, Answer, Failure, SimulatorError
from megarl.robots.envs.batched_pool import BatchedPool
from megarl.robots.envs.opened import Pool, open_pool
from megarl.robots.envs.pool import SimulatorPool
from megarl.robots.envs.settings import SimulatorSettings

__all__ = [
    "Advice",
    "Answer",
    "BatchedPool",
    "Failure",
    "Pool",
    "SimulatorError",
    "SimulatorPool",
    "SimulatorSettings",
    "open_pool",
]
