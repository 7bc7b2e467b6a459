"""ManiSkill 3 on a GPU: many Franka arms on tables, whose scenes are simulated and rendered together.

Written against the source of mani_skill 3.0.1. Tasks, actions, states and ends of episodes (success or the limit) are
those of `maniskill.py`. All scenes move in each environment step, also those whose episodes are over.

A start state's objects are drawn by torch's generator, which ManiSkill seeds with the first of the seeds of a reset.
So rows are reset one by one, each with its trial as seed; every such reset renders all scenes once. PhysX on a GPU does
not promise the same bits in every run, so the replay of an episode may differ.

Tasks that build other objects in each scene (`PickSingleYCB-v1`, `OpenCabinetDrawer-v1`) are unsuitable: the objects
belong to the scene and not to the trial, so a start state depends on the row that plays it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .batched import BatchedSimulator, Rows, RowSteps, Views
from .maniskill import ManiSkill, check_actions
from .protocol import TaskSpec


class BatchedManiSkill(BatchedSimulator):
    """Many environments of one task of ManiSkill, simulated together on one device."""

    settings: ClassVar[Mapping[str, Any]] = {
        **ManiSkill.settings,
        # where physics are simulated: gpu, the device of the trainer's rank; or cpu, with one environment only
        "sim_backend": "gpu",
        "render_backend": "gpu",
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return the ManiSkill tasks that the setting `tasks` names."""
        return ManiSkill.tasks(settings)

    def __init__(self, task: str, settings: Mapping[str, Any], rows: int) -> None:
        chosen, self.spec = {**self.settings, **settings}, ManiSkill.find_task(task, settings)
        try:
            import gymnasium
            import mani_skill.envs  # noqa: F401, registers the tasks
            import torch
        except ImportError as error:
            raise ImportError(
                "ManiSkill is not installed in this interpreter: run `pip install mani_skill torch` in an environment "
                f"of its own, and set `python` to its interpreter ({error})"
            ) from error
        if chosen["sim_backend"] == "cpu" and rows > 1:
            raise ValueError(
                f"{task}: sim_backend=cpu has one environment, not {rows}; set `sim_backend` to gpu, or `workers` to 1"
            )
        made = gymnasium.make(
            task,
            num_envs=rows,
            obs_mode="rgb",
            control_mode=chosen["control"],
            robot_uids="panda",
            sim_backend=chosen["sim_backend"],
            render_backend=chosen["render_backend"],
            sensor_configs={"width": chosen["size"], "height": chosen["size"]},
        )
        self._torch, self._rows = torch, rows
        self._env: Any = made.unwrapped  # without gymnasium's own limit of steps
        check_actions(self._env, self.spec, chosen["control"])

    def reset(self, rows: Rows, trials: NDArray[np.int64]) -> None:
        """Begin an episode in each of `rows`, with the number of the trial as random seed."""
        for row, trial in zip(rows.tolist(), trials.tolist(), strict=True):
            # ManiSkill extends a shorter list of seeds by random ones, and this row might get one of them.
            options = {"env_idx": self._torch.tensor([row], device=self._env.device)}
            self._raw, _ = self._env.reset(seed=[trial] * self._rows, options=options)

    def step(self, rows: Rows, actions: NDArray[np.float32]) -> RowSteps:
        """Execute one environment step in each of `rows`, with the actions [R, D]. ManiSkill renders in every step, so
        the seconds that are recorded as `physics` include rendering."""
        everyone = np.zeros((self._rows, self.spec.action_dim), np.float32)
        everyone[rows] = np.clip(actions, -1, 1)
        self._raw, _, _, _, info = self._env.step(self._torch.from_numpy(everyone).to(self._env.device))
        success = self._of(info["success"], rows)
        return RowSteps(success, success)

    def observe(self, rows: Rows) -> Views:
        """Return the pictures and joint positions of `rows`."""
        sensors = self._raw["sensor_data"]
        frames = {name: self._of(sensors[name]["rgb"], rows) for name in self.spec.cameras}
        return Views(frames, self._of(self._raw["agent"]["qpos"], rows).float())

    def close(self) -> None:
        """Free the resources of all environments."""
        self._env.close()

    def _of(self, values: Any, rows: Rows) -> Any:
        """Return the entries of `rows` in `values`, a tensor with one entry for each environment."""
        return values[self._torch.from_numpy(rows).to(values.device)]
