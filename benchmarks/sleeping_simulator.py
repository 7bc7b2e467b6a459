"""A simulator whose physics take as long as it is told, for `python -m megarl.benchmarks.waiting`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from megarl.simulators.protocol import Numbers, Observation, Outcome, Simulator, TaskSpec


class Sleeping(Simulator):
    """Sleeps for every environment step, as physics on a core or device of its own would take its time.

    Settings: `step_ms` of an environment step, `max_steps` of an episode, which always lasts that long.
    """

    settings: ClassVar[Mapping[str, Any]] = {"step_ms": 5.0, "max_steps": 64}

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """One task."""
        limit = {**cls.settings, **settings}["max_steps"]
        return [TaskSpec("sleep", "sleep", 1000, limit, action_dim=7, state_dim=1, cameras={"top": (8, 8)})]

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        own = {**self.settings, **settings}
        self.spec = self.tasks(settings)[0]
        self._step_s, self._limit, self._taken = own["step_ms"] / 1000, self.spec.max_steps, 0

    def reset(self, trial: int) -> Observation:
        """A reset takes no time."""
        self._taken = 0
        return self._see()

    def step(self, actions: Numbers) -> Outcome:
        """All of `actions`, or what is left of the episode."""
        executed = min(len(actions), self._limit - self._taken)
        time.sleep(self._step_s * executed)
        self._taken += executed
        over = self._taken == self._limit
        return Outcome(self._see(), executed, success=over, over=over)

    def _see(self) -> Observation:
        return Observation({"top": np.zeros((8, 8, 3), np.uint8)}, np.array([self._taken / self._limit], np.float32))
