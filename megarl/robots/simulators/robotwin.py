"""RoboTwin 2: two arms, 14 numbers. Written against its published source, never run.

`root` is a checkout of RoboTwin with its assets. A trial is one of the seeds of `seeds`, a JSON file of lists by task,
as RoboTwin's users make them (`{"click_bell": {"success_seeds": [100000, ...]}}`): not every seed has a stable scene
that its expert solves. The seeds of `eval_seeds`, a file of the same form, follow, and are only for evaluation.

An action is the positions of all joints, left arm, left gripper, right arm, right gripper, in RoboTwin's units:
radians, and 0 to 1 for grippers. Nothing is clipped. The state is the same 14 numbers. Limits are RoboTwin's own, by
task, unless `max_steps` has the task.

The instruction is the task's description, or with `instructions` one that RoboTwin builds from the trial's objects, in
words that its training data has (`seen`) or lacks (`unseen`); the choice depends only on the seed. The objects come
from `get_info` of SimpleVLA-RL's tasks, or else from the expert, which plays each trial once for it.

RoboTwin rebuilds the scene for every episode; the robot, its planner and the renderer are kept.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .protocol import Numbers, Observation, Outcome, Simulator, TaskSpec

ACTION = 14
CONFIGURATION = "env_cfg/task_config"
INSTRUCTIONS = ("task", "seen", "unseen")


class RoboTwin(Simulator):
    """One task of RoboTwin."""

    settings: ClassVar[Mapping[str, Any]] = {
        "root": None,
        "tasks": (),
        "seeds": None,
        "eval_seeds": None,
        "config": "demo_clean",  # task configuration; demo_randomized has other light, tables and objects
        "cameras": ("head_camera", "left_camera", "right_camera"),
        "max_steps": {},
        "instructions": "task",  # kind of instruction: task, seen or unseen
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return the tasks that the setting `tasks` names, with limits from the files of RoboTwin's repository."""
        chosen = {**cls.settings, **settings}
        root = _root(chosen["root"])
        if chosen["instructions"] not in INSTRUCTIONS:
            raise ValueError(
                f"RoboTwin: the setting instructions is {chosen['instructions']!r}; allowed: {', '.join(INSTRUCTIONS)}"
            )
        limits = {**_yaml(root, "_eval_step_limit"), **chosen["max_steps"]}
        sizes, config = _yaml(root, "_camera_config"), _yaml(root, chosen["config"])["camera"]
        types = {
            name: config[f"{'head' if name == 'head_camera' else 'wrist'}_camera_type"] for name in chosen["cameras"]
        }
        specs = []
        for task in chosen["tasks"]:
            if task not in limits:
                raise ValueError(
                    f"neither RoboTwin nor `max_steps` has a limit of steps for the task {task!r}: correct the name, "
                    "or add the task to `max_steps`"
                )
            measured = _seeds(chosen["eval_seeds"], task) if chosen["eval_seeds"] else []
            described = json.loads((root / f"description/task_instruction/{task}.json").read_text())
            specs.append(
                TaskSpec(
                    name=task,
                    instruction=described["full_description"],
                    trials=len(_seeds(chosen["seeds"], task)) + len(measured),
                    max_steps=limits[task],
                    action_dim=ACTION,
                    state_dim=ACTION,
                    cameras={name: (sizes[kind]["h"], sizes[kind]["w"]) for name, kind in types.items()},
                    evaluation=len(measured),
                )
            )
        return specs

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        chosen, self.spec = {**self.settings, **settings}, self.find_task(task, settings)
        files = [chosen["seeds"], *filter(None, [chosen["eval_seeds"]])]
        self._seeds = [seed for file in files for seed in _seeds(file, task)]
        self._root = _root(chosen["root"])
        self._arguments = _arguments(self._root, task, chosen["config"])
        if str(self._root) not in sys.path:
            sys.path.insert(0, str(self._root))
        with contextlib.chdir(self._root):
            self._unstable = importlib.import_module("envs.utils.create_actor").UnStableError
            self._env = getattr(importlib.import_module(f"envs.{task}"), task)()
        self._kind, self._instructions = chosen["instructions"], dict[int, str]()
        self._open = False

    def reset(self, trial: int) -> Observation:
        """Begin an episode with the seed number `trial` of the task's list."""
        self.begin(trial)
        if self._kind != "task" and trial not in self._instructions:
            self._set_up(trial)
            with contextlib.redirect_stdout(sys.stderr), contextlib.chdir(self._root):
                self._instructions[trial] = self._instruction(self._seeds[trial])
        self._set_up(trial)
        return replace(self._observation(), instruction=self._instructions.get(trial, ""))

    def _set_up(self, trial: int) -> None:
        """Build the scene of a trial; the previous one is removed."""
        self.close()
        seed = self._seeds[trial]
        try:
            # RoboTwin's paths are relative to its checkout.
            with contextlib.redirect_stdout(sys.stderr), contextlib.chdir(self._root):
                self._env.setup_demo(now_ep_num=trial, seed=seed, is_test=True, **self._arguments)
        except self._unstable as error:
            raise ValueError(
                f"{self.spec.name}: the seed {seed} cannot be used ({error}); remove it from the file `seeds` or "
                "`eval_seeds`"
            ) from error
        self._open = True

    def _instruction(self, seed: int) -> str:
        """Return RoboTwin's instruction for the current scene; empty: it has none."""
        objects = self._env.get_info() if hasattr(self._env, "get_info") else self._env.play_once()["info"]
        made = importlib.import_module("description.utils.generate_episode_instructions")
        before = random.getstate()
        random.seed(seed)  # RoboTwin chooses the descriptions with the module `random`
        try:
            descriptions = made.generate_episode_descriptions(self.spec.name, [objects], 1)
        except SystemExit as error:  # RoboTwin exits if a description is missing
            raise ValueError(
                f"{self.spec.name}, seed {seed}: RoboTwin has no text that describes {objects}; complete the folder "
                "description/objects_description of RoboTwin"
            ) from error
        finally:
            random.setstate(before)
        texts = descriptions[0][self._kind] if descriptions else []
        return str(texts[0]) if texts else ""

    def step(self, actions: Numbers) -> Outcome:
        """Move both arms through the joint positions `actions` [K, 14]. The seconds of `physics` include rendering all
        pictures except the last."""
        return self.execute(np.asarray(actions, np.float64), self._act, self._observation)

    def _act(self, action: NDArray[np.float64]) -> bool:
        with contextlib.redirect_stdout(sys.stderr):
            self._env.take_action(action, action_type="qpos")
        return bool(self._env.eval_success)

    def _observation(self) -> Observation:
        raw = self._env.get_obs()
        frames = {name: np.asarray(raw["observation"][name]["rgb"], np.uint8) for name in self.spec.cameras}
        state = np.asarray(raw["joint_action"]["vector"], np.float32)
        if state.shape != (ACTION,):
            raise ValueError(
                f"{self.spec.name}: the joints have shape {state.shape}, not {(ACTION,)} as those of aloha-agilex"
            )
        return Observation(frames, state)

    def close(self) -> None:
        """Close RoboTwin's scene if an episode has opened one."""
        if self._open:
            self._env.close_env()
        self._open = False


def _root(configured: str | None) -> Path:
    root = Path(configured or "").expanduser().resolve()
    if configured is None or not (root / CONFIGURATION).is_dir():
        raise FileNotFoundError(
            f"RoboTwin: the setting root is {configured!r}, which is not a checkout of RoboTwin with {CONFIGURATION}; "
            "run `git clone https://github.com/RoboTwin-Platform/RoboTwin`, follow its installation, and set `root` to "
            "its folder"
        )
    return root


def _seeds(file: str | None, task: str) -> list[int]:
    if file is None:
        raise ValueError('RoboTwin: `seeds` must name a JSON file {"TASK": {"success_seeds": [...]}}')
    listed = json.loads(Path(file).expanduser().read_text())
    if task not in listed:
        raise ValueError(
            f"RoboTwin: {file} has no seeds for the task {task!r}, only for {', '.join(listed) or 'none'}; choose one "
            "of these tasks, or add the task to the file"
        )
    return list(listed[task]["success_seeds"])


def _yaml(root: Path, name: str) -> Any:
    import yaml

    return yaml.safe_load((root / CONFIGURATION / f"{name}.yml").read_text())


def _arguments(root: Path, task: str, config: str) -> dict[str, Any]:
    """Return the arguments of `setup_demo`: the configurations of the task, of both arms and of the head camera."""
    import yaml

    arguments = _yaml(root, config)
    arguments |= {"task_name": task, "task_config": config, "render_freq": 0, "save_data": False, "eval_mode": False}
    arguments["data_type"] |= {"rgb": True, "qpos": True}
    camera = _yaml(root, "_camera_config")[arguments["camera"]["head_camera_type"]]
    arguments |= {"head_camera_h": camera["h"], "head_camera_w": camera["w"]}
    if len(arguments["embodiment"]) != 1:
        raise ValueError(
            f"RoboTwin: {config}: the embodiment is {arguments['embodiment']}; allowed: one robot with two arms"
        )
    robot = root / _yaml(root, "_embodiment_config")[arguments["embodiment"][0]]["file_path"]
    description = yaml.safe_load((robot / "config.yml").read_text())
    for arm in ("left", "right"):
        arguments |= {f"{arm}_robot_file": str(robot), f"{arm}_embodiment_config": description}
    arguments["dual_arm_embodied"] = True
    return arguments
