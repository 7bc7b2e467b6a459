"""Isaac Lab: many robots on a GPU, of a manager-based environment with cameras. Needs isaaclab and Isaac Sim.

Written against the source of isaaclab 2.3.2, never run: Isaac Sim needs a GPU with ray tracing cores. `tasks` names
registered environments with what their names do not say: `Isaac-Stack-Cube-Franka-IK-Rel-Visuomotor-v0: {instruction:
stack the cubes, max_steps: 400, action_dim: 7, state_dim: 9}`. A trial is the seed of a row's reset. Rows are reset one
by one, so that its random events draw the same numbers in every row.

Isaac Lab resets a terminated row within the same step, before anything is observed. So the environment gets none of its
termination terms; they are evaluated here after each step. The term `success` is the task's success; all other terms
except time limits end the episode. The state is the positions of the robot's joints; actions are the environment's, in
its own units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .batched import BatchedSimulator, Rows, RowSteps, Views
from .protocol import SettingError, TaskSpec

_FACTS = ("instruction", "max_steps", "action_dim", "state_dim")


class IsaacLab(BatchedSimulator):
    """Many environments of one registered task of Isaac Lab, simulated together on one device."""

    settings: ClassVar[Mapping[str, Any]] = {
        "tasks": {},  # name -> {instruction, max_steps, action_dim, state_dim}
        "trials": 100,
        "cameras": ("table_cam",),  # names of camera sensors of the scene
        "size": 128,  # height and width of the pictures
        "robot": "robot",  # name of the articulation in the scene whose joints are the state
        "success": "success",  # name of the termination term that means success
        "device": "cuda:0",  # the only device that the process sees: that of the trainer's rank
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return the tasks that the setting `tasks` names."""
        chosen = {**cls.settings, **settings}
        if len(chosen["tasks"]) > 1:
            problem = "Isaac Lab has one environment, and so one task, in a process"
            raise SettingError(problem, "tasks", list(chosen["tasks"]), "one task")
        for name, task in chosen["tasks"].items():
            if set(task) != set(_FACTS):
                raise ValueError(
                    f"Isaac Lab: in the setting `tasks`, {name!r} has the keys {', '.join(map(str, task)) or 'none'}; "
                    f"needed: exactly {', '.join(_FACTS)}"
                )
        return [
            TaskSpec(
                name=name,
                trials=chosen["trials"],
                cameras=dict.fromkeys(chosen["cameras"], (chosen["size"], chosen["size"])),
                **task,
            )
            for name, task in chosen["tasks"].items()
        ]

    def __init__(self, task: str, settings: Mapping[str, Any], rows: int) -> None:
        chosen = {**self.settings, **settings}
        self.spec = next(spec for spec in self.tasks(settings) if spec.name == task)
        self._rows, self._robot, self._success = rows, chosen["robot"], chosen["success"]
        _start_app(chosen["device"])
        import gymnasium
        import isaaclab_tasks  # noqa: F401, registers the tasks
        import torch
        from isaaclab.managers import TerminationManager
        from isaaclab_tasks.utils import parse_env_cfg

        self._torch = torch
        config = parse_env_cfg(task, device=chosen["device"], num_envs=rows)
        for camera in self.spec.cameras:
            sensor = getattr(config.scene, camera, None)
            if sensor is None:
                raise ValueError(f"{task} has no camera {camera!r}; set `cameras` to camera sensors of its scene")
            sensor.height = sensor.width = chosen["size"]
        # Without another rendering, the picture after a reset would show the scene before the reset.
        config.num_rerenders_on_reset = max(1, config.num_rerenders_on_reset)
        terms, config.terminations = config.terminations, {}
        self._env: Any = gymnasium.make(task, cfg=config).unwrapped
        self._terms = TerminationManager(terms, self._env)
        if self._success not in self._terms.active_terms:
            raise ValueError(
                f"{task} has no termination term {self._success!r}, which marks its success; set `success` to "
                f"one of {', '.join(self._terms.active_terms) or 'none'}"
            )
        if self._env.action_manager.total_action_dim != self.spec.action_dim:
            raise ValueError(
                f"{task} takes actions of {self._env.action_manager.total_action_dim} numbers, but `action_dim` in the "
                f"setting `tasks` is {self.spec.action_dim}"
            )

    def reset(self, rows: Rows, trials: NDArray[np.int64]) -> None:
        """Begin an episode in each of `rows`, with the number of the trial as random seed."""
        for row, trial in zip(rows.tolist(), trials.tolist(), strict=True):
            numbers = self._torch.tensor([row], device=self._env.device)
            self._env.reset(seed=trial, env_ids=numbers)
            self._terms.reset(numbers)

    def step(self, rows: Rows, actions: NDArray[np.float32]) -> RowSteps:
        """Execute one environment step in each of `rows`, with the actions [R, D], which are in the environment's own
        units and are not clipped."""
        everyone = np.zeros((self._rows, self.spec.action_dim), np.float32)
        everyone[rows] = actions
        self._env.step(self._torch.from_numpy(everyone))
        self._terms.compute()
        return RowSteps(self._of(self._terms.get_term(self._success), rows), self._of(self._terms.terminated, rows))

    def observe(self, rows: Rows) -> Views:
        """Return the pictures and joint positions of `rows`."""
        scene = self._env.scene
        frames = {name: self._of(scene[name].data.output["rgb"], rows)[..., :3] for name in self.spec.cameras}
        return Views(frames, self._of(scene[self._robot].data.joint_pos, rows))

    def close(self) -> None:
        """Close the environments; the application Isaac Sim ends with the process."""
        self._env.close()

    def _of(self, values: Any, rows: Rows) -> Any:
        """Return the entries of `rows` in `values`, a tensor with one entry for each environment."""
        return values[self._torch.from_numpy(rows).to(values.device)]


def _start_app(device: str) -> None:
    """Start the application Isaac Sim without a window, once per process. Other modules of Isaac Lab can be imported
    only after that."""
    try:
        from isaaclab.app import AppLauncher
    except ImportError as error:
        raise ImportError(
            "Isaac Lab is not installed in this interpreter: install it as its documentation says (pip install "
            f"'isaaclab[isaacsim,all]'), and set `python` to its interpreter ({error})"
        ) from error
    global _app
    if _app is None:
        _app = AppLauncher(headless=True, enable_cameras=True, device=device).app


_app: Any = None
