"""Heartbeats, where something else stands in place of their file."""

import math

from megarl.runtime.health import Heartbeat, read_beat


def test_a_folder_in_place_of_a_heartbeat_is_no_beat_and_is_set_aside(tmp_path):
    heart = Heartbeat(tmp_path, 0)
    file = tmp_path / "heartbeats/rank_0"
    file.unlink()
    file.mkdir()
    assert read_beat(tmp_path, 0) is None
    heart._looked = -math.inf
    heart.beat("update")
    beat = read_beat(tmp_path, 0)
    assert beat is not None
    assert file.with_name("rank_0.damaged-1").is_dir()


def test_a_folder_in_place_of_a_heartbeat_does_not_stop_the_start(tmp_path):
    (tmp_path / "heartbeats/rank_0").mkdir(parents=True)
    Heartbeat(tmp_path, 0)
    assert read_beat(tmp_path, 0) is not None
