"""Names of the fields of a batch that hold pictures; there is one field per camera."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.components import settings_at
from megarl.robots.config import EmbeddingSettings

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

#: Before each policy call, and after the last one of the episode.
FRAMES, END_FRAMES = "frames/", "end_frames/"
#: Prefix of pictures of the whole episode as the simulator rendered them: only rewards that look at videos read them.
CLIP = "clip/"

#: Entry of the data files that stands for start states of the simulator in the section `robot`.
SIMULATOR = "simulator"


def compared_fields(config: RunConfig) -> list[str]:
    """Return the fields that rewards compare between episodes; none if the reward is only success."""
    robot = config.robot
    if robot is None or robot.reward.name == "success":
        return []
    wanted = settings_at("robot.reward.embedding", robot.reward.embedding, EmbeddingSettings)
    prefixes = (CLIP,) if wanted.by_steps else (FRAMES, END_FRAMES)
    return ["states", "end_state", *(prefix + camera for prefix in prefixes for camera in robot.cameras)]


def clip_fields(config: RunConfig) -> list[str]:
    """Return the names of the episodes' clips: only the score reads them, and they take as much memory as all other
    observations together."""
    return [name for name in compared_fields(config) if name.startswith(CLIP)]
