"""ManiSkill 3: a Franka arm on a table, one CPU scene per simulator. Written against its published source, never run.

`tasks` lists the tasks with details that their names lack: `PickCube-v1: {instruction: lift the red cube, max_steps:
50}`. A trial is the seed of a reset. The state is the positions of the arm's joints; privileged knowledge (the cube's
place) is in no observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .protocol import Numbers, Observation, Outcome, Simulator, TaskSpec

#: Control mode -> dimension of an action of the arm with its gripper.
ACTIONS = {"pd_ee_delta_pose": 7, "pd_ee_delta_pos": 4, "pd_joint_delta_pos": 8}
JOINTS = 9


class ManiSkill(Simulator):
    """One task of ManiSkill."""

    settings: ClassVar[Mapping[str, Any]] = {
        "tasks": {},  # name -> {instruction, max_steps}
        "trials": 100,
        "control": "pd_ee_delta_pose",
        "cameras": ("base_camera",),
        "size": 128,
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return the ManiSkill tasks that the setting `tasks` names."""
        chosen = {**cls.settings, **settings}
        if chosen["control"] not in ACTIONS:
            control = chosen["control"]
            raise ValueError(f"ManiSkill: invalid value of `control`: {control!r}; allowed: {', '.join(ACTIONS)}")
        return [
            TaskSpec(
                name=name,
                instruction=task["instruction"],
                trials=chosen["trials"],
                max_steps=task["max_steps"],
                action_dim=ACTIONS[chosen["control"]],
                state_dim=JOINTS,
                cameras=dict.fromkeys(chosen["cameras"], (chosen["size"], chosen["size"])),
            )
            for name, task in chosen["tasks"].items()
        ]

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        chosen, self.spec = {**self.settings, **settings}, self.find_task(task, settings)
        import gymnasium
        import mani_skill.envs  # noqa: F401, registers the tasks

        made = gymnasium.make(
            task,
            num_envs=1,
            obs_mode="rgb",
            control_mode=chosen["control"],
            robot_uids="panda",
            sim_backend="cpu",
            sensor_configs={"width": chosen["size"], "height": chosen["size"]},
        )
        self._env: Any = made.unwrapped  # without gymnasium's own limit of steps
        check_actions(self._env, self.spec, chosen["control"])

    def reset(self, trial: int) -> Observation:
        """Begin an episode with the seed `trial`."""
        self.begin(trial)
        self._raw, _ = self._env.reset(seed=trial)
        return self._observation()

    def step(self, actions: Numbers) -> Outcome:
        """Execute actions [K, D]. The seconds of `physics` include rendering, since every step renders."""
        return self.execute(np.clip(np.asarray(actions, np.float32), -1, 1), self._act, self._observation)

    def _act(self, action: Numbers) -> bool:
        self._raw, _, _, _, info = self._env.step(action)
        return bool(_unbatched(info["success"]))

    def _observation(self) -> Observation:
        sensors = self._raw["sensor_data"]
        frames = {name: _unbatched(sensors[name]["rgb"]).astype(np.uint8) for name in self.spec.cameras}
        state = _unbatched(self._raw["agent"]["qpos"]).astype(np.float32)
        if state.shape != (self.spec.state_dim,):
            raise ValueError(
                f"{self.spec.name}: the robot's joints have shape {state.shape}, not {(self.spec.state_dim,)} as those "
                "of a Franka arm; choose another task"
            )
        return Observation(frames, state)

    def close(self) -> None:
        """Free the scene."""
        self._env.close()


def check_actions(env: Any, spec: TaskSpec, control: str) -> None:
    """Raise ValueError unless ManiSkill's environment `env`, with the control mode `control`, takes actions [D] of the
    size D that `spec` has."""
    shape = tuple(env.single_action_space.shape)
    if shape != (spec.action_dim,):
        raise ValueError(
            f"{spec.name}: with control {control!r} the simulator takes actions of shape {shape}, but megarl "
            f"expects {(spec.action_dim,)}; choose another `control` or another task"
        )


def _unbatched(value: Any) -> Any:
    """Return the only element of a batch of one, a torch tensor or numpy array, as a numpy array."""
    array = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    if len(array) != 1:
        raise ValueError(f"the simulator returned a batch of shape {array.shape}, not a batch of one")
    return array[0]
