"""Messages between a trainer and a simulator's process."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.robots.simulators.protocol import TaskSpec
from megarl.robots.simulators.wire import Inbox, pack, places, plain_spec, spec_of

SPEC = TaskSpec("push", "push the disc", 50, 100, 4, 0, {"front": (4, 6), "wrist": (2, 3)})


def test_messages_arrive_whole_however_they_are_cut() -> None:
    arrays = {"state": np.arange(3, dtype=np.float32), "none": np.empty((0, 4), np.float32)}
    data = pack({"call": "step", "over": False}, arrays) + pack({"call": "expert"})
    for size in (1, 7, len(data)):
        inbox, found = Inbox(), []
        for start in range(0, len(data), size):
            inbox.feed(data[start : start + size])
            while (message := inbox.take()) is not None:
                found.append(message)
        (first, got), (second, nothing) = found
        assert (first, second, nothing) == ({"call": "step", "over": False}, {"call": "expert"}, {})
        assert got["state"].dtype == np.float32
        assert got["state"].tolist() == [0, 1, 2]
        assert got["none"].shape == (0, 4)
        got["state"][0] = 5  # owned by whoever took the message


def test_a_number_that_is_not_finite_is_no_message() -> None:
    with pytest.raises(ValueError, match="JSON"):
        pack({"progress": float("nan")})


def test_a_task_goes_over_as_it_is() -> None:
    assert spec_of(plain_spec(SPEC)) == SPEC


def test_pictures_lie_one_after_the_other() -> None:
    assert places(SPEC) == ({"front": (0, (4, 6, 3)), "wrist": (72, (2, 3, 3))}, 90)
