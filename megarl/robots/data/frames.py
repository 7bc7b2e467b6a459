"""Names of the fields of a batch that hold pictures; there is one field per camera."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.components import settings_at
from megarl.robots.config import EmbeddingSettings

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

#: Prefixes of the pictures before each policy call, and of the picture after the last call of the episode.
FRAMES, END_FRAMES = "frames/", "end_frames/"
#: Prefix of clips: frames of the whole episode as the simulator rendered them, for scores by a video encoder.
CLIP = "clip/"

#: Entry of `data.train_files` and `data.val_files` for start states of the simulator.
SIMULATOR = "simulator"


def compared_fields(config: RunConfig) -> list[str]:
    """Return the fields by which `progress` scores compare episodes; empty if the reward is `success`."""
    robot = config.robot
    if robot is None or robot.reward.name == "success":
        return []
    wanted = settings_at("robot.reward.embedding", robot.reward.embedding, EmbeddingSettings)
    prefixes = (CLIP,) if wanted.by_steps else (FRAMES, END_FRAMES)
    return ["states", "end_state", *(prefix + camera for prefix in prefixes for camera in robot.cameras)]


def clip_fields(config: RunConfig) -> list[str]:
    """Return the names of the clip fields, which are dropped after scoring, as they take as much memory as all other
    observations together."""
    return [name for name in compared_fields(config) if name.startswith(CLIP)]
