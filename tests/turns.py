"""Tests that need the machine for themselves, when several processes of pytest-xdist share the suite."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest


class Turns:
    """Lock files of one run of the suite: `room` is held by one, or shared by several; whoever waits for it holds
    `gate`, so that nobody passes by one who came earlier and wants the machine for itself.

    Args:
        stem: path that all processes of the run give; the files are called after it.
    """

    def __init__(self, stem: Path) -> None:
        self.paths = [stem.with_name(f"{stem.name}.{name}") for name in ("gate", "room")]
        self._gate, self._room = (path.open("w") for path in self.paths)
        self._alone = False

    def enter(self, *, alone: bool) -> None:
        """Wait until nobody is alone or, for `alone`, until nobody is there. Nothing to wait for while one is alone."""
        if self._alone:
            return
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        self._alone = alone

    def leave(self) -> None:
        """Let others in."""
        self._alone = False
        fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """Remove the files; others that still hold them are not disturbed."""
        self._gate.close()
        self._room.close()
        for path in self.paths:
            path.unlink(missing_ok=True)


def files_alone(items: list[pytest.Item]) -> set[Path]:
    """Files with a test marked `alone`. Their servers live as long as the file, so all of it is."""
    return {item.path for item in items if item.get_closest_marker("alone")}


def longest_first(items: list[pytest.Item], alone: set[Path]) -> list[pytest.Item]:
    """Files that are alone, then those with servers, with groups of processes, then the rest.

    So the processes end at about one time.
    """

    def marked(name: str) -> set[Path]:
        return {item.path for item in items if item.get_closest_marker(name)}

    order = (alone, marked("servers"), marked("procs"))
    return sorted(items, key=lambda item: [item.path not in files for files in order])
