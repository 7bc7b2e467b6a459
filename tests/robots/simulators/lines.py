"""Many points on lines, as a user's own simulator of many environments: those of line.py, row by row."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from line import CAMERAS, SETTINGS, fails, task_of  # as a simulator's file imports another one of its folder

from megarl.robots.simulators.batched import BatchedSimulator, RowSteps, Views
from megarl.robots.simulators.protocol import TaskSpec


class Lines(BatchedSimulator):
    """Actions move points; from 1 on is success. A trial is where a point starts, in tenths."""

    settings: ClassVar[Mapping[str, Any]] = {
        **SETTINGS,
        "row": 0,  # the row that fails
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        return [task_of(name, settings) for name in ("left", "right")]

    def __init__(self, task: str, settings: Mapping[str, Any], rows: int) -> None:
        print(f"constructs {task}")
        self.spec, self._settings = self.tasks(settings)[task == "right"], settings
        self._trials, self._places, self._steps = np.zeros(rows, np.int64), np.zeros(rows), np.zeros(rows, np.int64)
        if settings["wrong"] == "construct":
            raise FileNotFoundError("meshes are missing")

    def reset(self, rows: Any, trials: Any) -> None:
        self._trials[rows], self._places[rows], self._steps[rows] = trials, trials / 10, 0

    def step(self, rows: Any, actions: Any) -> RowSteps:
        if self._now("exit", rows):
            print("the physics engine gives up")
            os._exit(7)
        if self._now("hang", rows):
            time.sleep(600)
        if self._now("raise", rows):
            raise RuntimeError("a joint is out of range")
        if self._now("chance", rows):
            self._places[self._settings["row"]] += int.from_bytes(os.urandom(3), "big") / 1e9
        self._places[rows] += np.clip(actions[:, 0], -1, 1)
        self._steps[rows] += 1
        done = self._places[rows] >= 1
        others = np.setdiff1d(np.arange(len(self._places)), rows)
        self._places[others] = 77  # scenes that are not in the call may be moved
        return RowSteps(done, done)

    def observe(self, rows: Any) -> Views:
        shown = np.array([round(place * 100) % 256 for place in self._places[rows]], np.uint8)
        frames = {
            name: np.broadcast_to(shown[:, None, None, None], (len(rows), *size, 3)) for name, size in CAMERAS.items()
        }
        states = np.stack([self._places[rows], self._steps[rows]], 1).astype(np.float32)
        if self._now("state", rows):
            states[rows == self._settings["row"], 0] = np.nan
        if self._now("frames", rows):
            frames["wrist"] = np.full((len(rows), 2, 2, 3), np.nan)
        return Views(frames, states)

    def instructions(self, rows: Any) -> list[str]:
        return [self._settings["told"].format(trial=trial) for trial in self._trials[rows]]

    def progress(self, rows: Any) -> Any:
        return np.clip(self._places[rows], 0, 1)

    def expert(self, rows: Any) -> Any:
        return np.tile(np.array([0.25, 0], np.float32), (len(rows), 1))

    def _now(self, wrong: str, rows: Any) -> bool:
        row = self._settings["row"]
        return row in rows and fails(self._settings, wrong, self._steps[row])
