"""Simulators of robots: processes with interpreters of their own."""

from megarl.envs.robots.answers import Advice, Answer, Failure, SimulatorError
from megarl.envs.robots.pool import SimulatorPool
from megarl.envs.robots.settings import SimulatorSettings

__all__ = ["Advice", "Answer", "Failure", "SimulatorError", "SimulatorPool", "SimulatorSettings"]
