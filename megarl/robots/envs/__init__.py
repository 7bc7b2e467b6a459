"""Runs robots' simulators in separate processes, each with its own Python interpreter."""

from megarl.robots.envs.answers import Advice, Answer, Failure, SimulatorError
from megarl.robots.envs.pool import SimulatorPool
from megarl.robots.envs.settings import SimulatorSettings

__all__ = ["Advice", "Answer", "Failure", "SimulatorError", "SimulatorPool", "SimulatorSettings"]
