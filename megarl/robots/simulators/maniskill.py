"""ManiSkill 3: a Franka arm on a table, one CPU scene per simulator. Written against its published source, never run.

`tasks` lists the tasks with facts that their names lack: `PickCube-v1: {instruction: lift the red cube, max_steps:
50}`. A trial is the seed of a reset. The state is the positions of the arm's joints; privileged knowledge (the cube's
place) is in no observation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .protocol import Numbers, Observation, Outcome, Simulator, TaskSpec

#: Control mode to the dimension of an action of the arm with its gripper.
ACTIONS = {"pd_ee_delta_pose": 7, "pd_ee_delta_pos": 4, "pd_joint_delta_pos": 8}
JOINTS = 9


class ManiSkill(Simulator):
    """One task of ManiSkill."""

    settings: ClassVar[Mapping[str, Any]] = {
        "tasks": {},  # name to {instruction, max_steps}
        "trials": 100,
        "control": "pd_ee_delta_pose",
        "cameras": ("base_camera",),
        "size": 128,
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return the tasks that `tasks` names."""
        chosen = {**cls.settings, **settings}
        if chosen["control"] not in ACTIONS:
            raise ValueError(f"ManiSkill: control: {chosen['control']!r}; allowed: {', '.join(ACTIONS)}")
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
        chosen, specs = {**self.settings, **settings}, {spec.name: spec for spec in self.tasks(settings)}
        if task not in specs:
            raise ValueError(f"ManiSkill: task {task!r} is not one of `tasks`: {', '.join(specs) or 'none'}")
        import gymnasium
        import mani_skill.envs  # noqa: F401, registers the tasks

        self.spec = specs[task]
        made = gymnasium.make(
            task,
            num_envs=1,
            obs_mode="rgb",
            control_mode=chosen["control"],
            robot_uids="panda",
            sim_backend="cpu",
            sensor_configs={"width": chosen["size"], "height": chosen["size"]},
        )
        self._env: Any = made.unwrapped  # replaces gymnasium's own limit of steps
        shape = tuple(self._env.single_action_space.shape)
        if shape != (self.spec.action_dim,):
            raise ValueError(f"{task}: an action has shape {shape}, not {(self.spec.action_dim,)}")
        self._steps, self._over = 0, True

    def reset(self, trial: int) -> Observation:
        """Begin an episode with the seed `trial`."""
        self.refuse_trial(trial)
        raw, _ = self._env.reset(seed=trial)
        self._steps, self._over = 0, False
        return self._observation(raw)

    def step(self, actions: Numbers) -> Outcome:
        """Execute actions [K, D]. `physics` includes the pictures' seconds, since every step renders."""
        if self._over:
            raise RuntimeError(f"{self.spec.name}: this episode is over; reset begins another")
        began, executed, success = time.perf_counter(), 0, False
        for action in np.clip(np.asarray(actions, np.float32), -1, 1)[: self.spec.max_steps - self._steps]:
            raw, _, _, _, info = self._env.step(action)
            executed, success = executed + 1, bool(_unbatched(info["success"]))
            if success:
                break
        self._steps += executed
        self._over = success or self._steps >= self.spec.max_steps
        seconds = {"physics": time.perf_counter() - began}
        return Outcome(self._observation(raw), executed, success, self._over, seconds=seconds)

    def _observation(self, raw: Mapping[str, Any]) -> Observation:
        frames = {name: _unbatched(raw["sensor_data"][name]["rgb"]).astype(np.uint8) for name in self.spec.cameras}
        state = _unbatched(raw["agent"]["qpos"]).astype(np.float32)
        if state.shape != (self.spec.state_dim,):
            raise ValueError(f"{self.spec.name}: the arm has joints {state.shape}, not {(self.spec.state_dim,)}")
        return Observation(frames, state)

    def close(self) -> None:
        """Free the scene."""
        self._env.close()


def _unbatched(value: Any) -> Any:
    """Return the only element of a batch of one, of torch or of numpy."""
    array = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    if len(array) != 1:
        raise ValueError(f"a batch of one was expected, not {array.shape}")
    return array[0]
