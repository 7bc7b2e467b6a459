"""The interface of a simulator of many environments of one task, in one process on one device.

    BatchedSimulator(task, settings, rows)   once per task: constructs `rows` environments
    reset(rows, trials)                      environments begin an episode, each in its own start state
    step(rows, actions) -> RowSteps          one environment step of environments
    observe(rows) -> Views                   their pictures and states

A row is an environment's number, from 0 to `rows` - 1. Arrays have a leading axis of the R rows of the call, in its
order; an array is one of numpy, or a torch tensor on any device. An episode depends on its task, trial and actions, not
on its row and not on the other rows.

All episodes in flight are stepped together. After a `step` the scene of a row that was not in the call may be another
one: simulators on GPUs move all of their environments at once. Only rows whose episodes are over are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .protocol import TaskSpec

#: Numbers of R environments (rows), int64 [R].
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class RowSteps:
    """The result of one environment step of R environments (rows)."""

    success: Any  # whether the task is done, bool [R]
    terminated: Any  # whether the episode is over before its limit of environment steps: done or failed, bool [R]


@dataclass(frozen=True)
class Views:
    """The observations of R environments (rows)."""

    frames: Mapping[str, Any]  # pictures, uint8 [R, H, W, 3], by camera
    states: Any  # the robots' own states, float32 [R, state_dim]


class BatchedSimulator:
    """The base class of simulators that run many environments in one process; an object simulates one task. A row is
    the number of an environment."""

    spec: TaskSpec  # the description of this task
    #: Keys of `settings`, with their defaults.
    settings: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return all available tasks with these settings; nothing is constructed."""
        raise NotImplementedError

    def __init__(self, task: str, settings: Mapping[str, Any], rows: int) -> None:
        """Construct `rows` environments of the task with the name `task`."""
        raise NotImplementedError

    def reset(self, rows: Rows, trials: NDArray[np.int64]) -> None:
        """Begin an episode in each of `rows`, in the start states `trials` [R]; the other environments stay as they
        are."""
        raise NotImplementedError

    def step(self, rows: Rows, actions: NDArray[np.float32]) -> RowSteps:
        """Execute one environment step in each of `rows`, with the actions [R, D].

        Values of actions are clipped to -1 to 1, unless the simulator's file states that it has units of its own.
        """
        raise NotImplementedError

    def observe(self, rows: Rows) -> Views:
        """Return the present pictures and robots' states of `rows`."""
        raise NotImplementedError

    def instructions(self, rows: Rows) -> Sequence[str]:
        """Return the instruction of each row's episode; empty: the instruction of the task."""
        return [""] * len(rows)

    def progress(self, rows: Rows) -> Any:
        """Return the completed part of the task in each row, 0 to 1, float [R]; None: the simulator does not measure
        it."""
        return None

    def expert(self, rows: Rows) -> Any:
        """Return a scripted expert's next action in each row, float32 [R, D]; None: there is no expert."""
        return None

    def close(self) -> None:
        """Free the simulator's resources, such as its renderer."""


def as_numpy(values: Any) -> NDArray[Any]:
    """Return an array, or a torch tensor on any device, as a numpy array; only a tensor on another device is copied."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)
