"""A machine of a Ray cluster that is lost, and another one in its place."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.launchers.test_launchers import DEADLINE_S, command, environment

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.campaign("kills")]


def test_a_run_that_lost_its_machine_goes_on_when_there_is_another(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 128 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"num_cpus": 0})
    try:
        machine = cluster.add_node(**node)
        started = environment() | {"RAY_ADDRESS": cluster.address, "RESTARTS": "1"}
        process = subprocess.Popen(
            command("ray", "wait_until_lost", tmp_path), env=started, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + DEADLINE_S
        while not all((tmp_path / f"pid_{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (tmp_path / "lost").touch()
        cluster.remove_node(machine, allow_graceful=False)
        while "starts again (1 of 1; " not in (tmp_path / "log.txt").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        cluster.add_node(**node)
        error = process.communicate(timeout=DEADLINE_S)[1]
    finally:
        cluster.shutdown()
    assert process.returncode == 0, error
    assert "[rank 1] worker 1 lives" in (tmp_path / "log.txt").read_text().splitlines()
