"""What a simulator of a robot's task is: built once, reset for every episode, stepped by chunks of actions.

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
    """What a policy has to know of a task.

    Attributes:
        name: names it in recipes and metrics.
        instruction: what the policy is told, where an episode has no instruction of its own.
        trials: number of start states.
        max_steps: environment steps after which an episode is over.
        action_dim: numbers of an action, D.
        state_dim: numbers of the robot's own state; 0: it tells none.
        cameras: height and width of the pictures, by camera.
        evaluation: so many start states, the last ones, are of a list that nobody trains on, only measures with.
    """

    name: str
    instruction: str
    trials: int
    max_steps: int
    action_dim: int
    state_dim: int
    cameras: Mapping[str, tuple[int, int]]
    evaluation: int = 0


@dataclass(frozen=True)
class Observation:
    """What a policy sees.

    Attributes:
        frames: uint8 [H, W, 3], by camera.
        state: float32 [state_dim].
        instruction: of the observation that begins an episode: what the policy is told in this one; empty: the task's.
            The same in every episode of a trial.
    """

    frames: Mapping[str, Frame]
    state: Numbers
    instruction: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a chunk of actions came to.

    Attributes:
        observation: after the last action that was executed.
        executed: environment steps.
        success: the task is done.
        over: it is, or the limit of environment steps is reached.
        progress: how much of the task is done, 0 to 1, where the simulator knows; never shown to a policy.
        seconds: spent, by `physics` and `render`.
        clip: of an episode that is over and is recorded, frames uint8 [n, H, W, 3] by camera; a simulator leaves it
            out, its process adds it.
    """

    observation: Observation
    executed: int
    success: bool
    over: bool
    progress: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    clip: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """What is held of an episode for a reward that looks at videos.

    Attributes:
        cameras: whose frames, as the simulator renders them.
        frames: of each camera, at most; evenly spread over the environment steps.
    """

    cameras: tuple[str, ...]
    frames: int


class Simulator:
    """Base of all simulators: one task.

    Attributes:
        spec: of this task.
    """

    spec: TaskSpec
    #: Keys of `settings`, with their defaults.
    settings: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """All tasks that there are with these settings; nothing is constructed."""
        raise NotImplementedError

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        """Construct the simulator of the task of this name."""
        raise NotImplementedError

    def reset(self, trial: int) -> Observation:
        """Begin an episode in start state `trial`, from 0 to `spec.trials` - 1."""
        raise NotImplementedError

    def step(self, actions: Numbers) -> Outcome:
        """Execute actions [K, D] until they are through, or the episode is over.

        Numbers are clipped to -1 to 1, except by a simulator that has units of its own, which its file then says.
        """
        raise NotImplementedError

    def expert(self) -> Numbers | None:
        """The action [D] of a scripted expert in the present state; None: there is none."""
        return None

    def close(self) -> None:
        """Free what the constructor took."""
