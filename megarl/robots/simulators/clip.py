"""Records the frames of an episode for a video encoder, and drops some while the episode is played.

All frames of an episode of 512 environment steps with pictures of 256 pixels take 100 MB. A video encoder needs 64
evenly spaced frames, but which ones is known only at the end. So four times as many are kept: when there are more,
every second one is dropped, and from then on only every second one is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Frames = NDArray[np.uint8]
_HELD = 4  # maximum number of frames in memory, as a multiple of the clip's frames


class ClipRecorder:
    """A recorder of one episode's frames, as the simulator rendered them.

    Args:
        cameras: cameras to record.
        frames: maximum number of frames in a clip; up to `4 * frames + 2` per camera are kept.
    """

    def __init__(self, cameras: Sequence[str], frames: int) -> None:
        self._cameras, self._frames = tuple(cameras), frames
        self._stride, self._count = 1, 0
        self._held: dict[int, dict[str, Frames]] = {}
        self._last: dict[str, Frames] = {}

    def add(self, seen: Mapping[str, Frames]) -> None:
        """Add the frames `seen` by camera; call it after the reset and after each environment step."""
        self._last = {camera: np.array(seen[camera], np.uint8) for camera in self._cameras}
        if self._count % self._stride == 0:
            self._held[self._count] = self._last
        self._count += 1
        if len(self._held) > _HELD * self._frames + 1:
            self._stride *= 2
            self._held = {place: frames for place, frames in self._held.items() if place % self._stride == 0}

    def places(self) -> list[int]:
        """Return the environment steps whose frames `clip` returns; 0 is the frame after the reset."""
        if self._count <= self._frames:
            return list(range(self._count))
        wanted = np.linspace(0, self._count - 1, self._frames, dtype=np.int64).tolist()
        last = max(self._held) // self._stride
        nearest = [min(round(place / self._stride), last) * self._stride for place in wanted[:-1]]
        return [*nearest, self._count - 1]

    def clip(self) -> dict[str, Frames]:
        """Return frames uint8 [n, H, W, 3] by camera: all of a short episode, else `frames` evenly spaced with both
        ends.

        Exact up to `4 * frames + 1` frames; in longer episodes each is the nearest kept frame, up to half a stride
        away.
        """
        chosen = [self._held.get(place, self._last) for place in self.places()]
        return {camera: np.stack([frames[camera] for frames in chosen]) for camera in self._cameras}
