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

#: Numbers of environments, int64 [R].
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class RowSteps:
    """The result of one environment step of R rows."""

    success: Any  # whether the task is done, bool [R]
    terminated: Any  # whether the episode is over before its limit of environment steps: done or failed, bool [R]


@dataclass(frozen=True)
class Views:
    """The observations of R rows."""

    frames: Mapping[str, Any]  # pictures, uint8 [R, H, W, 3], by camera
    states: Any  # the robots' own states, float32 [R, state_dim]


class BatchedSimulator:
    """The base class of simulators of many environments; an object simulates one task."""

    spec: TaskSpec  # the description of this task
    #: Keys of `settings`, with their defaults.
    settings: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return all available tasks with these settings; nothing is constructed."""
        raise NotImplementedError

    def __init__(self, task: str, settings: Mapping[str, Any], rows: int) -> None:
        """Construct `rows` environments of the task with this name."""
        raise NotImplementedError

    def reset(self, rows: Rows, trials: NDArray[np.int64]) -> None:
        """Begin an episode in each of `rows`, in the start states `trials` [R]; other rows stay as they are."""
        raise NotImplementedError

    def step(self, rows: Rows, actions: NDArray[np.float32]) -> RowSteps:
        """Execute one action [D] in each of `rows`, from `actions` [R, D].

        Numbers are clipped to -1 to 1, except by a simulator with its own units, which its file states.
        """
        raise NotImplementedError

    def observe(self, rows: Rows) -> Views:
        """Return the pictures and states of `rows`."""
        raise NotImplementedError

    def instructions(self, rows: Rows) -> Sequence[str]:
        """Return each episode's own instruction; empty: the task's instruction."""
        return [""] * len(rows)

    def progress(self, rows: Rows) -> Any:
        """Return the completed part of the task in each row, 0 to 1, float [R]; None: it is not measured."""
        return None

    def expert(self, rows: Rows) -> Any:
        """Return a scripted expert's actions, float32 [R, D]; None: there is no expert."""
        return None

    def close(self) -> None:
        """Free the simulator's resources, such as its renderer."""


def as_numpy(values: Any) -> NDArray[Any]:
    """Return an array or a tensor of any device as a numpy array; copied only from another device."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)
