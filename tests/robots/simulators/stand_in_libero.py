"""A stand-in for the packages `libero` and `robosuite`: their published interface and shapes, without physics."""

from __future__ import annotations

from pathlib import Path

_LIBERO = """
import os, yaml
config = os.path.join(os.environ["LIBERO_CONFIG_PATH"], "config.yaml")
if not os.path.exists(config):
    input("Do you want to specify a custom path for the dataset folder? (Y/N): ")
paths = yaml.safe_load(open(config))
_assets_path_cache = None
"""

_BENCHMARK = """
import types
import numpy as np

class Suite:
    def __init__(self, name):
        print("[info] using task orders")
        self.name = name

    def get_num_tasks(self):
        return 2

    def get_task(self, number):
        return types.SimpleNamespace(language=["put it there", "open it"][number])

    def get_task_init_states(self, number):
        return np.arange(12.0).reshape(3, 4) + 100 * number

    def get_task_bddl_file_path(self, number):
        return f"{self.name}/{number}.bddl"

def get_benchmark(name):
    return lambda: Suite(name)
"""

_ENVS = """
import types
import numpy as np

class Observable:
    def __init__(self, sensor):
        self._sensor, self._sampled = sensor, True

    def reset(self):
        pass

    def set_sensor(self, sensor):
        self._sensor, self.modality = sensor, sensor.__modality__
        sensor({})

class Domain:
    def __init__(self, camera_names, camera_heights, camera_widths):
        self.shape, self.hard_reset, self.built, self.pictures = (camera_heights, camera_widths, 3), True, 0, 0
        self.robots = [types.SimpleNamespace(gripper=types.SimpleNamespace(current_action=np.zeros(2)))]
        self.state, self.taken, self.met = np.zeros(4), [], 0
        self.parsed_problem = {"goal_state": [["on", "bowl", "plate"], ["open", "drawer"]]}
        model = types.SimpleNamespace(body_pos=np.zeros((2, 3)), body_quat=np.zeros((2, 4)))
        context = types.SimpleNamespace(scn=types.SimpleNamespace(flags=np.ones(10)))
        self.sim = types.SimpleNamespace(model=model, _render_context_offscreen=context)
        sensors = {f"{name}_image": self.camera(number) for number, name in enumerate(camera_names)}
        self._observables = {name: Observable(sensor) for name, sensor in sensors.items()}

    def camera(self, number):
        def sensor(cache):
            self.pictures += 1
            return np.full(self.shape, 100 * number + len(self.taken) + self.state[0], np.uint8)
        sensor.__modality__ = "image"
        return sensor

    def reset(self):
        self.built += self.hard_reset
        self.sim.model.body_pos[:] = np.random.rand(2, 3)  # fixtures
        self.taken, self.met = [], 0

    def _eval_predicate(self, goal):
        return self.met > self.parsed_problem["goal_state"].index(goal)

    def _update_observables(self, force):
        self.images = {name: observable._sensor({}) for name, observable in self._observables.items()}

    def _get_observations(self):
        fingers = np.array([0.04, -0.04])
        return {
            **self.images,
            "robot0_eef_pos": self.state[:3] + len(self.taken),
            "robot0_eef_quat": np.array([0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5)]),
            "robot0_gripper_qpos": fingers,
        }

class OffScreenRenderEnv:
    def __init__(self, bddl_file_name, ignore_done, **cameras):
        self.problem, self.env, self.closed = bddl_file_name, Domain(**cameras), False

    def seed(self, seed):
        np.random.seed(seed)

    def set_init_state(self, state):
        self.env.state = state
        self.env._update_observables(force=True)
        return self.env._get_observations()

    def step(self, action):
        self.env.taken.append(np.array(action))
        self.env.robots[0].gripper.current_action += action[-1]
        self.env.met += action[0] == 1
        self.env._update_observables(force=False)
        return self.env._get_observations(), 0.0, self.env.met == 2, {}

    def close(self):
        self.closed = True
"""

FILES = {
    "libero/__init__.py": "",
    "libero/libero/__init__.py": _LIBERO,
    "libero/libero/benchmark/__init__.py": _BENCHMARK,
    "libero/libero/envs/__init__.py": _ENVS,
    "robosuite/__init__.py": "",
    "robosuite/utils/__init__.py": "",
    "robosuite/utils/errors.py": "class RandomizationError(Exception):\n    pass\n",
    "mujoco/__init__.py": "class mjtRndFlag:\n    mjRND_SHADOW, mjRND_REFLECTION = 0, 2\n",
}


def write(folder: Path) -> None:
    """Put the packages into a folder, which belongs on `sys.path`."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
