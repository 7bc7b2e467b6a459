"""Servers of a team that is on several machines: a Ray whose nodes have addresses of their own on this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_forks.clusters import cluster
from tests.rollout.servers import need_interpreter
from tests.runtime import harness

pytestmark = [
    pytest.mark.procs,
    pytest.mark.wide,
    pytest.mark.servers,
    pytest.mark.campaign("servers"),
    pytest.mark.timeout(600),
]
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    """Three nodes with room for two workers each."""
    nodes = [{"num_cpus": 2, "node_ip_address": host} for host in HOSTS]
    with cluster(*nodes, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1"):  # else Ray takes one loopback address only
        yield


def served(folder: Path, *settings: str) -> tuple[dict[int, dict[str, float]], str]:
    """Metrics of a run with servers on this Ray, and what it says."""
    need_interpreter()
    recipe = harness.write_recipe(folder)
    common = ("rollout.engine=sglang", "sft.steps=0")
    steps = harness.run(recipe, folder / "run", *common, *settings, launcher="ray", program=True)
    return steps, (folder / "run" / "log.txt").read_text()


def test_a_team_on_two_machines_has_a_server_on_each(tmp_path: Path) -> None:
    steps, said = served(
        tmp_path,
        "rollout.sglang.servers=2",
        "sync.transport=distributed",
        "sync.verify=every",
        "cluster={nproc: 6, nnodes: 3, timeout_s: 400}",
        "placement.teams.train={roles: [actor, reference], devices: 2}",
        "placement.teams.draw={roles: [rollout], devices: 4}",
        "trainer.steps=3",
    )

    found = re.search(r"generation on SGLang servers at http://([\d.]+):\d+, http://([\d.]+):\d+; .* distributed", said)
    assert found is not None, said
    first, second = found.groups()
    assert first != second
    assert {first, second} < {*HOSTS}
    for step in (1, 2, 3):
        numbers = steps[step]
        assert (numbers["sync/servers"], numbers["sync/failed"]) == (2, 0)
        assert numbers["sync/verified_tensors"] > 0
        assert numbers["rollout_corr/staleness_max"] == 0
        assert numbers["rollout_corr/logp_diff_max"] < 1e-4  # fp32 with other kernels; old weights differ by 1e-2


def test_a_server_on_two_machines_generates_with_the_weights_of_every_step(tmp_path: Path) -> None:
    steps, said = served(
        tmp_path,
        "rollout.sglang={servers: 1, tp_size: 2, nnodes: 2, start_timeout_s: 390}",
        "sync.verify=every",
        "cluster={nproc: 6, nnodes: 3, timeout_s: 400}",
        "placement.teams.train={roles: [actor, reference], devices: 2}",
        "placement.teams.draw={roles: [rollout], devices: 4}",
        "trainer.steps=2",
    )

    assert re.search(r"servers at http://127\.0\.0\.[234]:\d+; .* distributed", said) is not None, said
    logs = tmp_path / "run" / "servers"
    assert {log.name for log in logs.glob("*.log")} == {"server_0.log", "server_0_node1.log"}
    assert "TP1]" in (logs / "server_0_node1.log").read_text()
    for step in (1, 2):
        numbers = steps[step]
        assert (numbers["sync/servers"], numbers["sync/failed"]) == (1, 0)
        assert numbers["sync/verified_tensors"] > 0
        assert numbers["rollout_corr/staleness_max"] == 0
        assert numbers["rollout_corr/logp_diff_max"] < 1e-4  # fp32 with other kernels; old weights differ by 1e-2


def test_a_team_on_one_machine_of_two_has_servers_that_the_other_one_reaches(tmp_path: Path) -> None:
    steps, said = served(
        tmp_path,
        "cluster={nproc: 4, nnodes: 2, timeout_s: 400}",
        "placement.teams.train={roles: [actor, reference], devices: 2}",
        "placement.teams.draw={roles: [rollout], devices: 2}",
        "trainer.steps=1",
    )

    assert steps[1]["sync/servers"] == 1
    assert re.search(r"servers at http://127\.0\.0\.[234]:\d+; ", said) is not None, said
