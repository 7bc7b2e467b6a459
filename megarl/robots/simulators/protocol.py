"""The interface of a simulator of a robot's task: constructed once, reset for every episode, stepped by action chunks.

    Simulator(task, settings)           once per process and task: seconds
    reset(trial) -> observation         an episode begins in one of the task's start states
    step(actions) -> outcome            one policy call: up to K environment steps, fewer at success or the limit

The same task, trial and actions give the same outcomes. An environment step is one action.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Frame = NDArray[np.uint8]
Numbers = NDArray[np.float32]


class SettingError(ValueError):
    """The error of a simulator that cannot use the value of one of its settings.

    Args:
        problem: what is wrong, in one clause.
        key: name of the setting.
        found: the setting's value, or the wrong part of it.
        allowed: the allowed values, as a list or in words.
    """

    def __init__(self, problem: str, key: str, found: Any, allowed: str | list[str]) -> None:
        super().__init__(problem)
        self.key, self.found, self.allowed = key, found, allowed


@dataclass(frozen=True)
class TaskSpec:
    """The properties of a task that a policy needs."""

    name: str  # the task's name in recipes and metrics
    instruction: str  # the policy's instruction, for episodes without their own
    trials: int  # number of start states
    max_steps: int  # environment steps after which an episode is over
    action_dim: int  # number of values of an action, D
    state_dim: int  # number of values of the robot's own state; 0: the robot has no state
    cameras: Mapping[str, tuple[int, int]]  # height and width of the pictures, by camera
    evaluation: int = 0  # number of start states, the last ones, that are only for evaluation
    # name under which validation reports this task together with all tasks of the same `source`; empty: the task's name
    source: str = ""
    part: str = ""  # name of a set of tasks that validation also reports as a whole; empty: no set


@dataclass(frozen=True)
class Observation:
    """The input of a policy."""

    frames: Mapping[str, Frame]  # pictures, uint8 [H, W, 3], by camera
    state: Numbers  # the robot's own state, float32 [state_dim]
    # in an episode's first observation, the episode's own instruction, equal in all episodes of a trial; empty: the
    # task's instruction
    instruction: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a chunk of actions."""

    observation: Observation  # observation after the last executed action
    executed: int  # number of executed environment steps
    success: bool  # whether the task is done
    over: bool  # whether the task is done, or the limit of environment steps is reached
    # completed part of the task, 0 to 1, if the simulator measures it; never shown to a policy
    progress: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)  # spent seconds, by `physics` and `render`
    # frames uint8 [n, H, W, 3] by camera, at the end of a recorded episode; added by the simulator's process
    clip: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """Which clip of an episode to record for a score by a video encoder."""

    cameras: tuple[str, ...]  # cameras to record, as the simulator renders them
    frames: int  # maximum number of frames per camera, evenly spaced over the environment steps


class Simulator:
    """The base class of simulators; an object simulates one task."""

    spec: TaskSpec  # the description of this task
    #: Keys of `settings`, with their defaults.
    settings: ClassVar[Mapping[str, Any]] = {}
    _steps, _over = 0, True  # executed environment steps of the episode, and whether it has ended

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return all available tasks with these settings; nothing is constructed."""
        raise NotImplementedError

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        """Construct the simulator of the task with this name."""
        raise NotImplementedError

    @classmethod
    def find_task(cls, name: str, settings: Mapping[str, Any]) -> TaskSpec:
        """Return the task with this name; raise ValueError, with the names of all tasks, if there is none."""
        specs = {spec.name: spec for spec in cls.tasks(settings)}
        if name not in specs:
            raise ValueError(f"{cls.__name__} has no task {name!r}; allowed: {', '.join(specs) or 'none'}")
        return specs[name]

    def begin(self, trial: int) -> None:
        """Begin to count an episode's environment steps; raise ValueError if the task has no start state `trial`."""
        self.refuse_trial(trial)
        self._steps, self._over = 0, False

    def refuse_trial(self, trial: int) -> None:
        """Raise ValueError if the task has no start state `trial`. Simulators that count their steps themselves call
        this instead of `begin`."""
        if not 0 <= trial < self.spec.trials:
            raise ValueError(f"{self.spec.name} has no trial {trial}; allowed: 0 to {self.spec.trials - 1}")

    def refuse_ended(self) -> None:
        """Raise RuntimeError if no episode has begun since the last one ended."""
        if self._over:
            raise RuntimeError(f"{self.spec.name}: this episode is over, or none has begun; call reset to begin one")

    def execute(self, actions: NDArray[Any], act: Callable[[Any], bool], observe: Callable[[], Observation]) -> Outcome:
        """Execute actions [K, D] until all are done, the task is done, or its limit is reached.

        Args:
            act: executes one action, and returns whether the task is done.
            observe: returns the observation after the last executed action.
        """
        self.refuse_ended()
        began, executed, success = time.perf_counter(), 0, False
        for action in actions[: self.spec.max_steps - self._steps]:
            executed, success = executed + 1, act(action)
            if success:
                break
        self._steps += executed
        self._over = success or self._steps >= self.spec.max_steps
        moved = time.perf_counter()
        observation = observe()
        seconds = {"physics": moved - began, "render": time.perf_counter() - moved}
        return Outcome(observation, executed, success, self._over, seconds=seconds)

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
        """Free the simulator's resources, such as its renderer."""
