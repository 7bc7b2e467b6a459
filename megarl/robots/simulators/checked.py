"""Checks of what a simulator returns, in the process that runs it, and of its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .protocol import Outcome, TaskSpec


class RefusedCall(Exception):
    """An error that is sent to the trainer instead of an answer; `kind`: `settings`, or a kind of episode failure."""

    def __init__(self, kind: str, text: str, **parts: Any) -> None:
        super().__init__(text)
        self.kind, self.parts = kind, parts


def complete_settings(known: Mapping[str, Any], given: Mapping[str, Any], tasks: Any) -> dict[str, Any]:
    """Return the values of all settings of a simulator: the recipe's, and the defaults of settings that it lacks.

    Args:
        known: the simulator's settings with their defaults.
        given: the simulator's settings in the recipe.
        tasks: the recipe's key `tasks`.

    Raises:
        RefusedCall: a key is unknown, or its value is of another type than the default.
    """
    given = dict(given)
    if tasks and ("tasks" in known or isinstance(tasks, dict)):
        given["tasks"] = tasks  # a mapping is refused below if the simulator has no setting `tasks`
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "a mapping"}
    for key, value in given.items():
        if key not in known:
            raise RefusedCall("settings", "unknown setting", key=key, found=value, allowed=list(known))
        if not _fits(value, known[key]):
            allowed = names.get(type(known[key]), "a list")
            raise RefusedCall("settings", "value of the wrong type", key=key, found=value, allowed=allowed)
    return {**known, **given}


def check_outcome(outcome: Outcome, given: int) -> None:
    """Raise RefusedCall if a simulator's outcome of a chunk of `given` actions is impossible."""
    if not 0 < outcome.executed <= given:
        raise RefusedCall("raised", f"a step executed {outcome.executed} of {given} actions; allowed: 1 to {given}")
    if outcome.success and not outcome.over:
        raise RefusedCall("raised", "an episode has succeeded but is not over: set `over` with `success`")
    if outcome.progress is not None and not math.isfinite(outcome.progress):
        raise RefusedCall("state", f"a step returned the progress {outcome.progress}; allowed: a finite number or None")


def checked_state(spec: TaskSpec, state: Any) -> NDArray[np.float32]:
    """Return a robot's state as float32 [state_dim]; raise RefusedCall if it has another shape or is not finite."""
    numbers = np.asarray(state, np.float32)
    if numbers.shape != (spec.state_dim,):
        raise RefusedCall("state", f"the state has the shape {list(numbers.shape)}; allowed: [{spec.state_dim}]")
    if not np.isfinite(numbers).all():
        where = np.flatnonzero(~np.isfinite(numbers)).tolist()
        raise RefusedCall("state", f"the state is not finite at {where} of {spec.state_dim} numbers")
    return numbers


def check_frames(layout: Mapping[str, tuple[int, tuple[int, int, int]]], frames: Mapping[str, Any]) -> None:
    """Raise RefusedCall if `frames`, pictures by camera, are not of the cameras in `layout` (of `places`), or not uint8
    of the shapes in it."""
    if set(frames) != set(layout):
        raise RefusedCall("frames", f"the pictures are of the cameras {sorted(frames)}; allowed: {sorted(layout)}")
    for camera, (_, shape) in layout.items():
        frame = np.asarray(frames[camera])
        if frame.dtype.kind == "f" and not np.isfinite(frame).all():
            raise RefusedCall("frames", f"the picture of camera {camera!r} is not finite")
        if frame.dtype != np.uint8 or frame.shape != shape:
            is_ = f"{frame.dtype} {list(frame.shape)}"
            raise RefusedCall("frames", f"the picture of camera {camera!r} is {is_}; allowed: uint8 {list(shape)}")


def _fits(value: Any, default: Any) -> bool:
    """Return whether a setting may have this value: of its default's type, or null; anything if the default is null."""
    if default is None or value is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    if isinstance(default, (list, tuple)):
        return isinstance(value, (list, tuple))
    return isinstance(value, type(default))
