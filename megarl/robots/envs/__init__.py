"""Simulators of robots: processes with interpreters of their own."""

from megarl.robots.envs.answers import Advice, Answer, Failure, SimulatorError
from megarl.robots.envs.pool import SimulatorPool
from megarl.robots.envs.settings import SimulatorSettings

__all__ = ["Advice", "Answer", "Failure", "SimulatorError", "SimulatorPool", "SimulatorSettings"]
