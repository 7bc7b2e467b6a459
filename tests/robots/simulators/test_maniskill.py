"""The adapter of ManiSkill against a stand-in with the shapes of its published source; the real one was never run."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from megarl.robots.simulators.maniskill import ManiSkill

SETTINGS = {"tasks": {"PickCube-v1": {"instruction": "pick up the red cube", "max_steps": 5}}, "size": 16, "trials": 4}


class Scene:
    """`PickCube-v1` with `num_envs=1, obs_mode="rgb"`: everything is a tensor with a batch of one in front."""

    single_action_space = types.SimpleNamespace(shape=(7,))

    def __init__(self) -> None:
        self.unwrapped, self.actions, self.done_after, self.closed = self, [], 99, False

    def observation(self) -> dict:
        value = self.seed * 10 + len(self.actions)
        picture = torch.full((1, 16, 16, 3), value, dtype=torch.uint8)
        return {
            "agent": {"qpos": torch.full((1, 9), float(value)), "qvel": torch.zeros(1, 9)},
            "extra": {
                "is_grasped": torch.tensor([False]),
                "tcp_pose": torch.zeros(1, 7),
                "goal_pos": torch.zeros(1, 3),
            },
            "sensor_param": {"base_camera": {"intrinsic_cv": torch.eye(3)[None]}},
            "sensor_data": {"base_camera": {"rgb": picture}},
        }

    def reset(self, seed: int) -> tuple[dict, dict]:
        self.seed, self.actions = seed, []
        return self.observation(), {"reconfigure": False}

    def step(self, action: np.ndarray) -> tuple:
        self.actions.append(action)
        success = torch.tensor([len(self.actions) >= self.done_after])
        return self.observation(), torch.zeros(1), success, torch.tensor([False]), {"success": success}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def scene(monkeypatch):
    made = Scene()
    made.arguments = {}
    gymnasium = types.SimpleNamespace(make=lambda task, **rest: made.arguments.update(task=task, **rest) or made)
    package = types.ModuleType("mani_skill")
    package.envs = types.ModuleType("mani_skill.envs")
    for name, module in {"gymnasium": gymnasium, "mani_skill": package, "mani_skill.envs": package.envs}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_tasks_are_those_that_the_settings_name():
    (spec,) = ManiSkill.tasks(SETTINGS)
    assert (spec.name, spec.instruction, spec.trials, spec.max_steps) == ("PickCube-v1", "pick up the red cube", 4, 5)
    assert (spec.action_dim, spec.state_dim, spec.cameras) == (7, 9, {"base_camera": (16, 16)})


def test_a_trial_is_the_seed_of_a_reset(scene):
    simulator = ManiSkill("PickCube-v1", SETTINGS)
    observation = simulator.reset(3)
    assert scene.arguments["control_mode"] == "pd_ee_delta_pose"
    assert scene.arguments["sensor_configs"] == {"width": 16, "height": 16}
    frame = observation.frames["base_camera"]
    assert frame.shape == (16, 16, 3)
    assert frame.dtype == np.uint8
    assert np.all(frame == 30)
    assert observation.state.dtype == np.float32
    np.testing.assert_array_equal(observation.state, np.full(9, 30))
    with pytest.raises(ValueError, match="trial 4; allowed: 0 to 3"):
        simulator.reset(4)


def test_a_chunk_stops_at_success(scene):
    simulator, scene.done_after = ManiSkill("PickCube-v1", SETTINGS), 2
    simulator.reset(0)
    outcome = simulator.step(np.full((4, 7), 2.0, np.float32))
    assert (outcome.executed, outcome.success, outcome.over) == (2, True, True)
    assert np.all(outcome.observation.frames["base_camera"] == 2)
    np.testing.assert_array_equal(scene.actions, np.ones((2, 7)))  # clipped
    with pytest.raises(RuntimeError, match="this episode is over"):
        simulator.step(np.zeros((1, 7), np.float32))


def test_an_episode_ends_at_its_limit(scene):
    simulator = ManiSkill("PickCube-v1", SETTINGS)
    simulator.reset(0)
    first, second = (simulator.step(np.zeros((3, 7), np.float32)) for _ in range(2))
    assert (first.executed, first.over) == (3, False)
    assert (second.executed, second.success, second.over) == (2, False, True)
    simulator.close()
    assert scene.closed


def test_another_arm_is_refused(scene):
    with pytest.raises(ValueError, match="has no task 'PickCube-v2'; allowed: PickCube-v1"):
        ManiSkill("PickCube-v2", SETTINGS)
    scene.single_action_space = types.SimpleNamespace(shape=(8,))
    with pytest.raises(ValueError, match=r"takes actions of shape \(8,\), but megarl expects \(7,\)"):
        ManiSkill("PickCube-v1", SETTINGS)
