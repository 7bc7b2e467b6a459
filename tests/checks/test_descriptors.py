"""How many file descriptors a rank needs, held against real process groups, and what is done about the limit."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

import pytest

from megarl.checks.checklist import Checklist
from megarl.checks.descriptors import LAZY_FROM, check_descriptors, descriptors, group_sizes
from megarl.config.load import load_config
from megarl.config.model import ParallelConfig
from megarl.dag.placement import together
from megarl.launchers.common import process_environment
from tests.dist import fresh_layout, no_parallel, run_distributed, world

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2, "pp": 2},
    {"cp": 2},
    {"tp": 2, "sp": True, "ep": 2, "etp": 1},
]


def groups_of_this_rank() -> list[Any]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    found = []
    for layout in LAYOUTS:
        no_parallel()
        world()
        before = len(os.listdir("/proc/self/fd"))
        fresh_layout(ParallelConfig(**layout))
        opened = len(os.listdir("/proc/self/fd")) - before
        found.append([opened, sorted(dist.get_world_size(g) for g in _world.pg_map if g is not dist.group.WORLD)])
    return found


@pytest.mark.procs
def test_groups_and_descriptors_are_those_of_real_processes() -> None:
    results = run_distributed(groups_of_this_rank, 4, 240)
    for layout, (_, sizes) in zip(LAYOUTS, results[0], strict=True):  # later pipeline stages are in one group less
        assert sizes == sorted(group_sizes(4, ParallelConfig(**layout))), layout
    for found in results:  # groups of earlier layouts close their sockets a little later, so only the first is counted
        assert found[0][0] == sum(size - 1 for size in found[0][1])


def checked(*overrides: str) -> list[Any]:
    checks = Checklist()
    config = load_config("grpo_quickstart", overrides)
    check_descriptors(config, together(config), checks)
    return checks.items


def test_a_small_run_says_nothing_and_a_large_one_how_many() -> None:
    assert checked("cluster.nproc=8") == []
    (check,) = checked("cluster.nproc=1024", "cluster.nnodes=128")
    assert f"about {descriptors(1024, ParallelConfig())} per rank" in check.message


def test_a_hard_limit_that_is_too_low_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    (check,) = checked("cluster.nproc=1024", "cluster.nnodes=128")
    assert check.status == "fail"
    assert "ulimit -Hn" in str(check.problem())


def test_connections_are_lazy_where_there_are_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    many = load_config("grpo_quickstart", [f"cluster.nproc={LAZY_FROM}"])
    assert process_environment(many, 8)["TORCH_GLOO_LAZY_INIT"] == "1"
    assert "TORCH_GLOO_LAZY_INIT" not in process_environment(load_config("grpo_quickstart"), 2)
    eager = sum(size - 1 for size in group_sizes(1024, ParallelConfig()))
    assert descriptors(1024, ParallelConfig()) < eager


def test_a_process_raises_its_limit_to_the_hard_one() -> None:
    code = (
        "import resource as r; from megarl.system.processes import raise_descriptor_limit as up;"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 512)); up(); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(512, 512)"
