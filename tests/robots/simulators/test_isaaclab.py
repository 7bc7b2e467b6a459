"""The adapter of Isaac Lab, against a stand-in with the forms of isaaclab's source."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from megarl.robots.simulators import isaaclab
from megarl.robots.simulators.isaaclab import IsaacLab
from megarl.robots.simulators.protocol import SettingError

TASK = "Isaac-Stack-Cube-Franka-IK-Rel-Visuomotor-v0"
FACTS = {"instruction": "stack the cubes", "max_steps": 9, "action_dim": 7, "state_dim": 2}
SETTINGS = {"tasks": {TASK: FACTS}, "trials": 8, "size": 16}


class Environments:
    """A manager-based environment that moves each robot by its first action; it resets a row that terminates."""

    device = "cpu"

    def __init__(self, cfg: Any) -> None:
        self.cfg, self.unwrapped = cfg, self
        self.action_manager = types.SimpleNamespace(total_action_dim=7)
        self.places = torch.zeros(cfg.scene.num_envs)
        camera = types.SimpleNamespace(data=types.SimpleNamespace(output={}))
        robot = types.SimpleNamespace(data=types.SimpleNamespace(joint_pos=None))
        self.scene = {"table_cam": camera, "robot": robot}
        self._write()

    def reset(self, seed: int, env_ids: torch.Tensor) -> None:
        assert self.cfg.num_rerenders_on_reset == 1
        self.places[env_ids] = seed + torch.arange(len(env_ids)).float()
        self._write()

    def step(self, actions: torch.Tensor) -> None:
        self.places += actions[:, 0]
        for term in self.cfg.terminations.values():
            self.places[term.func(self)] = 0.0
        self._write()

    def _write(self) -> None:
        size = self.cfg.scene.table_cam.height
        shape = (len(self.places), size, size, 4)
        self.scene["table_cam"].data.output["rgb"] = self.places[:, None, None, None].expand(shape).to(torch.uint8)
        self.scene["robot"].data.joint_pos = torch.stack([self.places, -self.places], 1)


class TerminationManager:
    """The part of isaaclab.managers.TerminationManager that evaluates terms."""

    def __init__(self, cfg: dict[str, Any], env: Any) -> None:
        self._cfg, self._env, self.active_terms, self.restarted = cfg, env, list(cfg), []

    def compute(self) -> None:
        self._values = {name: term.func(self._env) for name, term in self._cfg.items()}
        ends = [value for name, value in self._values.items() if not self._cfg[name].time_out]
        self.terminated = torch.stack(ends).any(0)

    def get_term(self, name: str) -> torch.Tensor:
        return self._values[name]

    def reset(self, env_ids: torch.Tensor) -> None:
        self.restarted += env_ids.tolist()


def config(task: str, device: str, num_envs: int) -> Any:
    def term(func: Any, time_out: bool = False) -> Any:
        return types.SimpleNamespace(func=func, time_out=time_out)

    terms = {
        "time_out": term(lambda env: torch.ones_like(env.places, dtype=torch.bool), time_out=True),
        "dropping": term(lambda env: env.places < 0),
        "success": term(lambda env: env.places > 5),
    }
    scene = types.SimpleNamespace(num_envs=num_envs, table_cam=types.SimpleNamespace(height=200, width=200))
    return types.SimpleNamespace(scene=scene, terminations=terms, num_rerenders_on_reset=0)


@pytest.fixture
def packages(monkeypatch) -> None:
    def module(name: str, **values: Any) -> None:
        made = types.ModuleType(name)
        vars(made).update(values)
        monkeypatch.setitem(sys.modules, name, made)

    module("isaaclab")
    module("isaaclab.app", AppLauncher=lambda **given: types.SimpleNamespace(app=given))
    module("isaaclab.managers", TerminationManager=TerminationManager)
    module("isaaclab_tasks")
    module("isaaclab_tasks.utils", parse_env_cfg=config)
    module("gymnasium", make=lambda task, cfg: Environments(cfg))
    monkeypatch.setattr(isaaclab, "_app", None)


def test_rows_that_end_are_observed_at_their_end(packages) -> None:
    simulator = IsaacLab(TASK, SETTINGS, 3)
    assert isaaclab._app == {"headless": True, "enable_cameras": True, "device": "cuda:0"}
    rows = np.array([2, 0, 1])
    simulator.reset(rows, np.array([4, 4, 0]))
    assert simulator.observe(rows).states.tolist() == [[4, -4], [4, -4], [0, 0]], "of one trial rows begin alike"
    assert simulator._terms.restarted == [2, 0, 1]
    actions = np.zeros((3, 7), np.float32)
    actions[:, 0] = [2.0, 0.5, -1.0]
    result = simulator.step(rows, actions)
    assert result.success.tolist() == [True, False, False]
    assert result.terminated.tolist() == [True, False, True], "a time limit is no end of the episode"
    views = simulator.observe(rows[:2])
    assert views.states[:, 0].tolist() == [6, 4.5], "not the row's next episode"
    assert views.frames["table_cam"].shape == (2, 16, 16, 3)


def test_what_the_environment_does_not_have_is_refused(packages, monkeypatch) -> None:
    with pytest.raises(ValueError, match="set `success` to one of time_out, dropping, success"):
        IsaacLab(TASK, SETTINGS | {"success": "done"}, 2)
    with pytest.raises(ValueError, match="no camera 'front'"):
        IsaacLab(TASK, SETTINGS | {"cameras": ["front"]}, 2)
    with pytest.raises(ValueError, match="takes actions of 7 numbers, but `action_dim` in the setting `tasks` is 8"):
        IsaacLab(TASK, SETTINGS | {"tasks": {TASK: FACTS | {"action_dim": 8}}}, 2)
    with pytest.raises(ValueError, match="needed: exactly instruction, max_steps, action_dim, state_dim"):
        IsaacLab.tasks({"tasks": {TASK: {"instruction": "stack"}}})
    with pytest.raises(SettingError, match="one environment, and so one task, in a process"):
        IsaacLab.tasks({"tasks": {TASK: FACTS, "Isaac-Lift-Cube-Franka-v0": FACTS}})
    monkeypatch.setitem(sys.modules, "isaaclab.app", None)
    with pytest.raises(ImportError, match="Isaac Lab is not installed in this interpreter"):
        IsaacLab(TASK, SETTINGS, 2)
