"""Converts a simulator's observations for the policy: pictures in the policy's size, and a scaled state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.artifacts.action_statistics import ActionStatistics
from megarl.robots.data.pictures import PicturePipeline
from megarl.robots.envs import Answer
from megarl.robots.simulators.protocol import Observation, Outcome, TaskSpec
from megarl.system.errors import ConfigError, choose


@dataclass(frozen=True)
class View:
    """Converts a simulator's observations for the policy once, where they arrive; batches hold the converted ones."""

    cameras: Sequence[str]  # names, in the policy's order
    pictures: PicturePipeline  # from a frame to a picture
    states: ActionStatistics | None = None  # scaling of the robot's own state; None: it is seen as it is

    def __call__(self, seen: Observation) -> Observation:
        """Convert a simulator's observation for the policy."""
        frames = {name: self.pictures(torch.from_numpy(seen.frames[name])).numpy() for name in self.cameras}
        state = seen.state if self.states is None else self.states.normalise(seen.state)
        return replace(seen, frames=frames, state=state)

    def of_answer(self, answer: Answer) -> Answer:
        """Return a simulator's answer with its observation converted for the policy."""
        if isinstance(answer, Observation):
            return self(answer)
        if isinstance(answer, Outcome):
            clip = {camera: self.upright(frames) for camera, frames in answer.clip.items()}
            return replace(answer, observation=self(answer.observation), clip=clip)
        return answer

    def upright(self, frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Turn frames [..., H, W, 3] by 180 degrees, if the simulator renders upside down."""
        return np.ascontiguousarray(frames[..., ::-1, ::-1, :]) if self.pictures.rotate else frames

    def of_task(self, spec: TaskSpec) -> TaskSpec:
        """Return the task as it is seen."""
        for camera in self.cameras:
            choose(spec.cameras, camera, "the simulator has no such camera", where="robot.cameras")
        if self.states is not None and self.states.dim != spec.state_dim:
            raise ConfigError(
                "the statistics are for a robot state of another size",
                where="robot.unnorm_key",
                found=f"{self.states.dim} numbers, and {spec.name} has {spec.state_dim}",
            )
        size = self.pictures.size
        return replace(spec, cameras=dict.fromkeys(self.cameras, (size, size)))
