"""Clips of episodes: every environment step as long as few are held, evenly spread, bounded in memory."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.robots.data.pictures import VideoPipeline
from megarl.robots.simulators.clip import ClipRecorder


def recorded(steps: int, frames: int) -> ClipRecorder:
    """An episode whose frames hold the number of their environment step, in one buffer that is written over."""
    recorder, buffer = ClipRecorder(["top"], frames), np.zeros((1, 1, 3), np.uint8)
    for step in range(steps):
        buffer[...] = step % 256, step // 256, 0
        recorder.add({"top": buffer, "other": buffer})
    return recorder


@pytest.mark.parametrize("steps", [1, 5, 8, 9, 20, 33])
def test_a_clip_is_what_the_encoders_pipeline_would_choose_of_all_frames(steps):
    recorder, wanted = recorded(steps, 8), VideoPipeline(frames=8)
    clip = recorder.clip()
    assert list(clip) == ["top"]
    told = [int(frame[0, 0, 0]) + 256 * int(frame[0, 0, 1]) for frame in clip["top"]]
    assert told == recorder.places()
    assert [told[place] for place in wanted.choose(len(told))] == wanted.choose(steps)


@pytest.mark.parametrize(("steps", "most"), [(34, 1), (66, 1), (67, 2), (513, 8)])
def test_frames_of_a_long_episode_are_near_those_that_were_wanted(steps, most):
    recorder = recorded(steps, 8)
    places = recorder.places()
    assert len(recorder._held) <= 33
    assert (places[0], places[-1]) == (0, steps - 1)
    assert max(abs(a - b) for a, b in zip(places, VideoPipeline(frames=8).choose(steps), strict=True)) <= most
    assert np.all(np.diff(places) > 0)


def test_libero_is_half_a_step_off_at_most():
    """64 frames of 512 environment steps and the reset: 257 of the 513 frames are held."""
    recorder = recorded(513, 64)
    assert len(recorder._held) == 257
    places = recorder.places()
    assert max(abs(a - b) for a, b in zip(places, VideoPipeline().choose(513), strict=True)) == 1
