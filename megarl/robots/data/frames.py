"""Names of the fields of a batch that hold pictures: of each camera, one field each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.components import settings_at
from megarl.robots.embedding_config import EmbeddingSettings

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

#: Before each policy call, and after the last one of the episode.
FRAMES, END_FRAMES = "frames/", "end_frames/"
#: Of the whole episode, as the simulator rendered it: for rewards that look at videos, never for the policy.
CLIP = "clip/"

#: In the place of files of data: start states of the simulator that the section `robot` names.
SIMULATOR = "simulator"


def compared_fields(config: RunConfig) -> list[str]:
    """Return the fields of episodes that are compared; none where only success counts."""
    robot = config.robot
    if robot is None or robot.reward.name == "success":
        return []
    wanted = settings_at("robot.reward.embedding", robot.reward.embedding, EmbeddingSettings)
    prefixes = (CLIP,) if wanted.by_steps else (FRAMES, END_FRAMES)
    return ["states", "end_state", *(prefix + camera for prefix in prefixes for camera in robot.cameras)]


def clip_fields(config: RunConfig) -> list[str]:
    """Return the fields that only a score reads: clips of episodes, which take as much memory as all else that is
    seen."""
    return [name for name in compared_fields(config) if name.startswith(CLIP)]
