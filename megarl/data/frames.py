"""Names of the fields of a batch that hold pictures: of each camera, one field each."""

from __future__ import annotations

#: Before each policy call, and after the last one of the episode.
FRAMES, END_FRAMES = "frames/", "end_frames/"
#: Of the whole episode, as the simulator rendered it: for rewards that look at videos, never for the policy.
CLIP = "clip/"

#: In the place of files of data: start states of the simulator that the section `robot` names.
SIMULATOR = "simulator"
