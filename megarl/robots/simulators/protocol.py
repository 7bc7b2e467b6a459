"""The interface of a simulator of a robot's task: constructed once, reset for every episode, stepped by action chunks.

    Simulator(task, settings)           once per process and task: seconds
    reset(trial) -> observation         an episode begins in one of the task's start states
    step(actions) -> outcome            one policy call: up to K environment steps, fewer at success or the limit

The same task, trial and actions give the same outcomes. An environment step is one action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Frame = NDArray[np.uint8]
Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class TaskSpec:
    """The facts about a task that a policy needs."""

    name: str  # in recipes and metrics
    instruction: str  # the policy's instruction, for episodes without their own
    trials: int  # number of start states
    max_steps: int  # environment steps after which an episode is over
    action_dim: int  # numbers of an action, D
    state_dim: int  # numbers of the robot's own state; 0: it has none
    cameras: Mapping[str, tuple[int, int]]  # height and width of the pictures, by camera
    evaluation: int = 0  # number of start states, the last ones, that are only for evaluation


@dataclass(frozen=True)
class Observation:
    """The input of a policy."""

    frames: Mapping[str, Frame]  # uint8 [H, W, 3], by camera
    state: Numbers  # float32 [state_dim]
    # in an episode's first observation: its own instruction; empty: the task's. Equal in all episodes of a trial.
    instruction: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a chunk of actions."""

    observation: Observation  # after the last executed action
    executed: int  # environment steps
    success: bool  # the task is done
    over: bool  # the task is done, or the limit of environment steps is reached
    progress: float | None = None  # done part of the task, 0 to 1, if the simulator knows it; never shown to a policy
    seconds: Mapping[str, float] = field(default_factory=dict)  # spent, by `physics` and `render`
    # frames uint8 [n, H, W, 3] by camera, at the end of a recorded episode; added by the simulator's process
    clip: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """Which clip of an episode to record for a score by a video encoder."""

    cameras: tuple[str, ...]  # cameras to record, as the simulator renders them
    frames: int  # maximum per camera; evenly spaced over the environment steps


class Simulator:
    """The base class of simulators: one task."""

    spec: TaskSpec  # of this task
    #: Keys of `settings`, with their defaults.
    settings: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return all available tasks with these settings; nothing is constructed."""
        raise NotImplementedError

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        """Construct the simulator of the task with this name."""
        raise NotImplementedError

    def refuse_trial(self, trial: int) -> None:
        """Raise ValueError if the task has no start state with this number."""
        if not 0 <= trial < self.spec.trials:
            raise ValueError(f"{self.spec.name}: trial {trial}; allowed: 0 to {self.spec.trials - 1}")

    def reset(self, trial: int) -> Observation:
        """Begin an episode in start state `trial`, from 0 to `spec.trials` - 1."""
        raise NotImplementedError

    def step(self, actions: Numbers) -> Outcome:
        """Execute actions [K, D] until all are done, or the episode is over.

        Numbers are clipped to -1 to 1, except by a simulator with its own units, which its file states.
        """
        raise NotImplementedError

    def expert(self) -> Numbers | None:
        """Return the action [D] of a scripted expert in the current state; None: there is none."""
        return None

    def close(self) -> None:
        """Free the resources of the constructor."""
