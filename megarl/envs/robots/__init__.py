"""Simulators of robots: processes with their own interpreters, and the code that plays episodes in them."""

from megarl.envs.robots.answers import Advice, Answer, Failure, SimulatorError
from megarl.envs.robots.playback import play
from megarl.envs.robots.pool import SimulatorPool
from megarl.envs.robots.settings import SimulatorSettings

__all__ = ["Advice", "Answer", "Failure", "SimulatorError", "SimulatorPool", "SimulatorSettings", "play"]
