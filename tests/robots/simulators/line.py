"""A point on a line, as a user's own simulator; `wrong` says how it fails."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megarl.robots.simulators.protocol import Numbers, Observation, Outcome, SettingError, Simulator, TaskSpec

CAMERAS = {"front": (4, 6), "wrist": (2, 2)}
#: Settings of one point and of many (lines.py).
SETTINGS: dict[str, Any] = {
    "wrong": "",  # how it fails
    "at": 2,  # environment steps of an episode after which it does
    "once": None,  # a file that is there once it has: then it does not again
    "limit": 6,
    "told": "",  # the instruction of an episode
}


class Line(Simulator):
    """Actions move a point; from 1 on is success. The trial is where it starts, in tenths."""

    settings: ClassVar[Mapping[str, Any]] = {
        **SETTINGS,
        "writes": "",  # a kind of tests/hostile.py that it writes into its descriptors where `wrong` is "write"
        "marker": "",  # a file that is there if what it writes is executed
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        if settings["wrong"] == "setting":
            raise SettingError("a line has no such end", "wrong", "setting", ["exit", "hang"])
        return [task_of(name, settings) for name in ("left", "right")]

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        print(f"constructs {task}")  # as simulators do
        self.spec, self._settings = task_of(task, settings), settings
        self._place, self._steps = 0.0, 0
        if settings["wrong"] == "construct":
            raise FileNotFoundError("meshes are missing")

    def reset(self, trial: int) -> Observation:
        self._place, self._steps = trial / 10, 0
        return replace(self._observation(), instruction=self._settings["told"].format(trial=trial))

    def step(self, actions: Numbers) -> Outcome:
        began = time.perf_counter()
        for executed, action in enumerate(actions, 1):  # noqa: B007
            self._fail()
            self._place += float(np.clip(action[0], -1, 1))
            self._steps += 1
            if self._place >= 1 or self._steps >= self.spec.max_steps:
                break
        success = self._place >= 1
        over = success or self._steps >= self.spec.max_steps
        seconds = {"physics": time.perf_counter() - began, "render": 0.0}
        return Outcome(self._observation(), executed, success, over, min(1.0, max(0.0, self._place)), seconds)

    def expert(self) -> Numbers:
        return np.array([0.25, 0], np.float32)

    def _now(self, wrong: str) -> bool:
        return fails(self._settings, wrong, self._steps)

    def _fail(self) -> None:
        if self._now("exit"):
            print("the physics engine gives up", file=sys.stderr)
            os._exit(7)
        if self._now("hang"):
            time.sleep(600)
        if self._now("write"):
            hostile = runpy.run_path(str(Path(__file__).parents[2] / "hostile.py"))
            hostile["attack"](self._settings["marker"], self._settings["writes"])
        if self._now("escape"):
            child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
            note = Path(self._settings["marker"])
            note.with_suffix(".new").write_text(str(child.pid))
            note.with_suffix(".new").rename(note)
            time.sleep(600)
        if self._now("shrink"):
            _shorten_memory()
        if self._now("raise"):
            raise RuntimeError("a joint is out of range")
        if self._now("chance"):
            self._place += int.from_bytes(os.urandom(3), "big") / 1e9

    def _observation(self) -> Observation:
        frames: dict[str, Any] = {
            name: np.full((*size, 3), round(self._place * 100) % 256, np.uint8) for name, size in CAMERAS.items()
        }
        state = np.array([self._place, self._steps], np.float32)
        if self._now("state"):
            state[0] = np.nan
        if self._now("frames"):
            frames["wrist"] = np.full((2, 2, 3), np.nan)
        if self._now("shape"):
            frames["front"] = frames["front"][:3]
        if self._now("camera"):
            del frames["wrist"]
        return Observation(frames, state)


def fails(settings: Mapping[str, Any], wrong: str, steps: int) -> bool:
    """Whether an episode fails in the way `wrong` after `steps` environment steps."""
    if settings["wrong"] != wrong or steps < settings["at"]:
        return False
    if settings["once"]:
        try:
            Path(settings["once"]).touch(exist_ok=False)  # of several processes one
        except FileExistsError:
            return False
    return True


def task_of(name: str, settings: Mapping[str, Any]) -> TaskSpec:
    return TaskSpec(name, f"go {name}", 5, settings["limit"], 2, 2, CAMERAS)


def _shorten_memory() -> None:
    """Take away what the trainer maps, where that is possible."""
    for name in os.listdir("/proc/self/fd"):
        try:
            os.ftruncate(int(name), 0)
        except OSError as error:
            print(f"{name}: {error.strerror}")
