"""GPUs that Ray gives to a run: a Ray of this machine that is told it had eight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers import test_launchers as every
from tests.ray_forks.clusters import cluster

pytestmark = [pytest.mark.procs, pytest.mark.wide]  # Ray ends itself where its own processes start slowly


@pytest.fixture(autouse=True)
def eight_gpus() -> Iterator[None]:
    with cluster({"num_cpus": 1, "num_gpus": 8}):
        yield


def test_gpus_of_servers_are_reserved_and_the_rest_is_for_others(tmp_path: Path) -> None:
    result = every.launch("ray", "tell_gpus", tmp_path, "2+1", "60", "4")

    assert result.code == 0, result.err
    seen = [json.loads((tmp_path / f"seen_{worker}.json").read_text()) for worker in range(3)]
    own = [s["CUDA_VISIBLE_DEVICES"] for s in seen]
    servers = seen[0]["MEGARL_SERVER_GPUS"].split(",")
    assert len(servers) == 4
    assert len({*own, *servers}) == 7
    assert {s["free"] for s in seen} == {1.0}
    assert seen[0]["MEGARL_TRAINER_GPUS"].split(",") == own
    assert [s["MEGARL_SERVER_GPUS"] for s in seen[1:]] == [seen[0]["MEGARL_SERVER_GPUS"], None]

    (tmp_path / "more").mkdir()
    refused = every.launch("ray", "tell_gpus", tmp_path / "more", "2+1", "60", "6")
    assert refused.code != 0
    assert "1 missing" in refused.err
    assert "actor 2 + reference 1 + SGLang servers 6 = 9; nodes have 8" in refused.err
