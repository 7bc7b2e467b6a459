"""Trajectories written by hand."""

from __future__ import annotations

from megarl.data.trajectory import Trajectory
from megarl.data.versions import VersionRuns


def add_turn(
    to: Trajectory, tokens: list[int], logprobs: list[float], versions: VersionRuns, reward: float = 0.0
) -> None:
    """A turn that ended by itself, and the environment's reward for it."""
    to.add_segment(tokens, logprobs, versions)
    to.end_turn("stop")
    to.turn_rewards.append(reward)
