"""Demonstrations in memory, with the interface of those that are read from files."""

from __future__ import annotations

from megarl.robots.data.demonstrations import Demonstration, OpenDemonstration


def opened(shown: Demonstration, where: str) -> OpenDemonstration:
    """Return a demonstration whose frames are read from `shown`."""
    frames = shown.frames
    return OpenDemonstration(
        shown.task, where, tuple(frames), shown.states, shown.actions, lambda camera, step: frames[camera][step]
    )
