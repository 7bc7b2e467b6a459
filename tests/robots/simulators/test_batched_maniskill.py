"""The adapter of ManiSkill's scenes on a GPU, against a stand-in with the forms of mani_skill's source."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from megarl.robots.simulators.batched_maniskill import BatchedManiSkill

SETTINGS = {"tasks": {"PickCube-v1": {"instruction": "pick up the red cube", "max_steps": 5}}, "trials": 4, "size": 16}


class Scenes:
    """Counts the steps of each scene since its reset, from ten times the first seed of the reset."""

    device = torch.device("cpu")
    single_action_space = types.SimpleNamespace(shape=(7,))

    def __init__(self, count: int, **arguments: Any) -> None:
        self.count, self.arguments, self.unwrapped = count, arguments, self
        self.places, self.actions = torch.zeros(count), torch.zeros(count, 7)

    def reset(self, seed: list[int], options: dict[str, Any]) -> tuple[Any, Any]:
        assert len(seed) == self.count
        # `torch.manual_seed(self._episode_seed[0])` goes before the draws of all rows of the call.
        self.places[options["env_idx"]] = 10.0 * seed[0] + torch.arange(len(options["env_idx"]))
        return self._seen(), {}

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        self.actions = actions
        self.places += 1
        done, failed = self.places > 11, self.places == 1
        no_limit = torch.zeros(self.count, dtype=torch.bool)
        return self._seen(), torch.zeros(self.count), done | failed, no_limit, {"success": done, "fail": failed}

    def _seen(self) -> Any:
        pictures = self.places[:, None, None, None].expand(-1, 16, 16, 3).to(torch.uint8)
        return {
            "sensor_data": {"base_camera": {"rgb": pictures}},
            "agent": {"qpos": self.places[:, None].expand(-1, 9)},
        }


@pytest.fixture
def made(monkeypatch) -> list[Scenes]:
    scenes: list[Scenes] = []

    def make(task: str, num_envs: int, **arguments: Any) -> Scenes:
        scenes.append(Scenes(num_envs, task=task, **arguments))
        return scenes[-1]

    package = types.ModuleType("mani_skill")
    package.envs = types.ModuleType("mani_skill.envs")
    gymnasium = types.ModuleType("gymnasium")
    gymnasium.make = make
    for name, module in {"gymnasium": gymnasium, "mani_skill": package, "mani_skill.envs": package.envs}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return scenes


def test_rows_are_reset_by_their_own_trials_and_step_together(made) -> None:
    simulator = BatchedManiSkill("PickCube-v1", SETTINGS, 3)
    assert (made[0].arguments["sim_backend"], made[0].arguments["render_backend"]) == ("gpu", "gpu")
    rows = np.array([2, 0])
    simulator.reset(rows, np.array([1, 1]))
    views = simulator.observe(rows)
    assert views.states[:, 0].tolist() == [10, 10], "of one trial both rows begin alike"
    assert views.frames["base_camera"].shape == (2, 16, 16, 3)
    simulator.reset(np.array([1]), np.array([0]))
    result = simulator.step(rows, np.full((2, 7), 2, np.float32))
    assert made[0].actions[:, 0].tolist() == [1, 0, 1], "clipped, and none of the row that is over"
    assert result.success.tolist() == [False, False]
    simulator.reset(np.array([1]), np.array([0]))
    assert simulator.step(np.array([1]), np.zeros((1, 7), np.float32)).terminated.tolist() == [False], "a failure"
    simulator.reset(rows, np.array([1, 1]))
    simulator.step(rows, np.zeros((2, 7), np.float32))
    assert simulator.step(rows, np.zeros((2, 7), np.float32)).terminated.tolist() == [True, True]
    assert simulator.observe(np.array([1])).states[0, 0] == 3


def test_a_missing_package_and_many_scenes_on_a_cpu_are_refused(made, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"sim_backend=cpu has one environment, not 2"):
        BatchedManiSkill("PickCube-v1", SETTINGS | {"sim_backend": "cpu"}, 2)
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    with pytest.raises(
        ImportError, match=r"ManiSkill is not installed in this interpreter: run `pip install mani_skill"
    ):
        BatchedManiSkill("PickCube-v1", SETTINGS, 2)
