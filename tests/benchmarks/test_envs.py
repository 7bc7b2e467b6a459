"""What `megarl bench envs` measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.benchmarks import envs
from megarl.system.errors import WorkerError

LINE = f"{Path(__file__).resolve().parents[1] / 'robots/simulators/line.py'}:Line"

pytestmark = pytest.mark.procs


def test_steps_constructions_and_seconds_are_counted() -> None:
    row = envs.measure({"name": LINE, "workers": 2, "limit": 20}, 50)
    assert row["env_steps"] >= 2 * 50
    assert row["constructions"] == 2
    assert row["rendering_ms_per_policy_call"] == 0
    assert 0 < row["share_of_time_in_simulators"] < 1
    for name in ("env_steps_per_s", "physics_ms_per_env_step", "first_reset_ms", "reset_ms", "construct_s"):
        assert row[name] > 0, name


def test_a_simulator_that_fails_is_not_measured() -> None:
    with pytest.raises(WorkerError, match=r"left, trial 0: its process ended \(exit code 7\)(?s:.*)gives up"):
        envs.measure({"name": LINE, "workers": 1, "wrong": "exit"}, 50)
