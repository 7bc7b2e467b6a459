"""The adapter of RoboTwin against a stand-in with the layout of its published source; the real one was never run."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest

from megarl.robots.simulators.robotwin import RoboTwin

FILES = {
    "env_cfg/task_config/_eval_step_limit.yml": "click_bell: 60\n",
    "env_cfg/task_config/_camera_config.yml": "L515: {fovy: 45, w: 32, h: 18}\nD435: {fovy: 37, w: 32, h: 24}\n",
    "env_cfg/task_config/_embodiment_config.yml": "aloha-agilex: {file_path: ./assets/embodiments/aloha-agilex/}\n",
    "env_cfg/task_config/demo_clean.yml": (
        "embodiment: [aloha-agilex]\n"
        "camera: {head_camera_type: D435, wrist_camera_type: L515}\n"
        "data_type: {rgb: true, qpos: false, depth: false}\n"
        "domain_randomization: {random_light: false}\n"
        "render_freq: 10\n"
    ),
    "assets/embodiments/aloha-agilex/config.yml": "arm_joints_name: [[a, b, c, d, e, f], [g, h, i, j, k, l]]\n",
    "description/task_instruction/click_bell.json": json.dumps({"full_description": "click the bell", "seen": ["no"]}),
    "seeds.json": json.dumps({"click_bell": {"success_seeds": [100003, 100007, 13]}}),
    "description/utils/generate_episode_instructions.py": """
import random

def generate_episode_descriptions(task, episodes, most):
    print("instructions")
    if episodes[0]["{A}"] == "bell/13":
        return []
    word = random.choice(["tap", "press", "ring", "hit", "push"])
    (objects,) = episodes
    return [{"episode_index": 0, "seen": [f"{word} {objects['{A}']}"], "unseen": [f"please {word} it"]}][:most]
""",
    "envs/__init__.py": "",
    "envs/utils/__init__.py": "",
    "envs/utils/create_actor.py": "class UnStableError(Exception):\n    pass\n",
    "envs/click_bell.py": """
import os
import numpy as np
from .utils.create_actor import UnStableError

class click_bell:
    opened = closed = 0

    def setup_demo(self, **arguments):
        if arguments["seed"] == 13:
            raise UnStableError("Objects is unstable in seed(13)")
        print("a robot is made")
        assert os.path.isdir("assets")
        self.arguments, self.opened = arguments, self.opened + 1
        self.take_action_cnt, self.eval_success, self.taken = 0, False, []

    def take_action(self, action, action_type):
        assert action_type == "qpos"
        self.taken.append(action)
        self.take_action_cnt += 1
        self.eval_success = action[0] > 3

    def get_obs(self):
        sizes = {"head_camera": (24, 32), "left_camera": (18, 32), "right_camera": (18, 32)}
        frames = {name: {"rgb": np.full((*size, 3), self.take_action_cnt, np.uint8)} for name, size in sizes.items()}
        vector = np.arange(14) + self.arguments["seed"]
        joints = {"left_arm": vector[:6], "left_gripper": vector[6], "vector": vector}
        return {"observation": frames, "pointcloud": [], "joint_action": joints, "endpose": {}}

    def play_once(self):
        self.experts = getattr(self, "experts", 0) + 1
        return {"info": {"{A}": f"bell/{self.arguments['seed'] % 100}"}}

    def close_env(self, clear_cache=False):
        self.closed += 1
""",
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield {"root": str(tmp_path), "tasks": ["click_bell"], "seeds": str(tmp_path / "seeds.json")}
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("envs", "description"):
            del sys.modules[name]


def test_a_task_is_described_by_the_files_of_the_checkout(settings):
    (spec,) = RoboTwin.tasks(settings)
    assert (spec.name, spec.instruction, spec.trials, spec.max_steps) == ("click_bell", "click the bell", 3, 60)
    assert (spec.action_dim, spec.state_dim) == (14, 14)
    assert spec.cameras == {"head_camera": (24, 32), "left_camera": (18, 32), "right_camera": (18, 32)}
    (shorter,) = RoboTwin.tasks({**settings, "max_steps": {"click_bell": 30}})
    assert shorter.max_steps == 30


def test_seeds_for_evaluation_follow_those_that_are_trained_on(settings, tmp_path):
    (tmp_path / "eval.json").write_text(json.dumps({"click_bell": {"success_seeds": [7, 8]}}))
    settings |= {"eval_seeds": str(tmp_path / "eval.json")}
    (spec,) = RoboTwin.tasks(settings)
    assert (spec.trials, spec.evaluation) == (5, 2)
    simulator = RoboTwin("click_bell", settings)
    simulator.reset(4)
    assert simulator._env.arguments["seed"] == 8


def test_trials_have_instructions_of_their_own_that_the_seed_chooses(settings, capsys):
    told = {}
    for kind in ("seen", "unseen"):
        simulator = RoboTwin("click_bell", {**settings, "instructions": kind})
        before = random.getstate()
        told[kind] = [simulator.reset(trial).instruction for trial in (0, 1, 0)]
        assert random.getstate() == before
        assert simulator._env.experts == 2, "once for each trial"
        assert told[kind][0] == told[kind][2]
        assert simulator.step(np.zeros((1, 14), np.float32)).observation.instruction == ""
    assert told["seen"][0].endswith(" bell/3")
    assert told["seen"][1].endswith(" bell/7")
    assert told["unseen"][0].startswith("please ")
    assert RoboTwin("click_bell", settings).reset(0).instruction == ""
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="instructions is 'new'; allowed: task, seen, unseen"):
        RoboTwin.tasks({**settings, "instructions": "new"})


def test_a_trial_is_a_seed_of_the_list_and_the_robot_is_kept(settings, capsys):
    simulator = RoboTwin("click_bell", settings)
    observation = simulator.reset(1)
    np.testing.assert_array_equal(observation.state, np.arange(14) + 100007)
    assert {name: frame.shape for name, frame in observation.frames.items()} == {
        name: (*size, 3) for name, size in simulator.spec.cameras.items()
    }
    taken = simulator._env.arguments
    assert (taken["seed"], taken["render_freq"], taken["is_test"]) == (100007, 0, True)
    assert taken["data_type"]["qpos"]
    assert taken["left_embodiment_config"] == taken["right_embodiment_config"]
    simulator.reset(0)
    assert (simulator._env.opened, simulator._env.closed) == (2, 1)
    assert capsys.readouterr().out == ""


def test_a_chunk_of_25_actions_stops_at_success_and_at_the_limit(settings):
    simulator = RoboTwin("click_bell", settings)
    simulator.reset(0)
    outcomes = [simulator.step(np.full((25, 14), 2.5, np.float32)) for _ in range(3)]
    assert [(o.executed, o.over) for o in outcomes] == [(25, False), (25, False), (10, True)]
    assert not outcomes[-1].success
    assert np.all(np.asarray(simulator._env.taken) == 2.5)  # radians: nothing is clipped
    simulator.reset(0)
    chunk = np.zeros((25, 14), np.float32)
    chunk[3, 0] = 3.5
    outcome = simulator.step(chunk)
    assert (outcome.executed, outcome.success, outcome.over) == (4, True, True)
    assert np.all(outcome.observation.frames["head_camera"] == 4)


def test_what_cannot_be_played_is_named(settings):
    simulator = RoboTwin("click_bell", settings)
    with pytest.raises(ValueError, match="click_bell: the seed 13 cannot be used"):
        simulator.reset(2)
    with pytest.raises(ValueError, match="trial 3; allowed: 0 to 2"):
        simulator.reset(3)
    with pytest.raises(ValueError, match="has a limit of steps for the task 'click'"):
        RoboTwin.tasks({**settings, "tasks": ["click"]})
    with pytest.raises(FileNotFoundError, match="is not a checkout"):
        RoboTwin.tasks({**settings, "root": None})
    with pytest.raises(ValueError, match="has no task 'lift_pot'; allowed: click_bell"):
        RoboTwin("lift_pot", settings)
