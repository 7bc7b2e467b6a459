"""A machine of a Ray cluster that is lost, and another one in its place."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.launchers.test_launchers import DEADLINE_S, command, environment
from tests.ray_forks.clusters import cluster

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.campaign("kills")]


def test_a_run_that_lost_its_machine_goes_on_when_there_is_another(tmp_path: Path) -> None:
    node = {"num_cpus": 1}
    with cluster({"num_cpus": 0}) as ray:
        machine = ray.add_node(**node)
        started = environment() | {"RESTARTS": "1"}
        process = subprocess.Popen(
            command("ray", "wait_until_lost", tmp_path), env=started, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + DEADLINE_S
        while not all((tmp_path / f"pid_{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (tmp_path / "lost").touch()
        ray.remove_node(machine, allow_graceful=False)
        while "starts again (1 of 1; " not in (tmp_path / "log.txt").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ray.add_node(**node)
        error = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 0, error
    assert "[rank 1] worker 1 lives" in (tmp_path / "log.txt").read_text().splitlines()
