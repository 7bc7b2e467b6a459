"""Groups of ranks that share one device of gloo, and what they say to each other on it."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.compat import gloo
from tests.dist import run_distributed

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")


def loops() -> int:
    """Threads that wait for what arrives at devices."""
    return sum(file.read_text() == "gloo_tcp_loop\n" for file in Path("/proc/self/task").glob("*/comm"))


def talk(count: int) -> dict[str, list[float]]:
    """Groups of both ranks talk at the same time, each on its own, before and after one of them ends."""
    groups = [dist.new_group([0, 1]) for _ in range(count)]
    alone = [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
    threads = loops()

    def sums(groups: list[dist.ProcessGroup]) -> list[float]:
        values = [torch.full((1000,), number + 0.5 * dist.get_rank()) for number in range(len(groups))]
        pairs = zip(values, groups, strict=True)
        for work in [dist.all_reduce(value, group=group, async_op=True) for value, group in pairs]:
            work.wait()
        return [float(value.sum()) / 1000 for value in values]

    dist.all_reduce(torch.ones(1), group=alone)
    before = sums(groups)
    dist.destroy_process_group(groups.pop(0))
    return {"threads": [threads, loops()], "before": before, "after": sums(groups)}


@pytest.mark.procs
def test_groups_share_a_device_and_each_reduces_its_own():
    for told in run_distributed(talk, 2, 120, 5):
        assert told["threads"] == [1, 1]
        assert told["before"] == [0.5, 2.5, 4.5, 6.5, 8.5]
        assert told["after"] == [0.5, 2.5, 4.5, 6.5]


def late(_: int) -> str:
    """The error of a group whose other rank does not come, though the two share a device with one that works."""
    short = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    error = ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.barrier(group=short)
        error = str(caught.value)
    dist.barrier()
    return error


@pytest.mark.procs
def test_each_group_keeps_its_deadline():
    assert "imed out" in run_distributed(late, 2, 120, 0)[0]


def after_a_fork(_: int) -> int:
    """Exit code of a child that makes a world of its own: 0 where that works."""
    dist.barrier()
    child = os.fork()
    if not child:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=20))
        group.allreduce([torch.ones(1)]).wait()
        os._exit(0 if loops() == 1 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.procs
def test_a_forked_process_gets_a_device_of_its_own():
    assert run_distributed(after_a_fork, 1, 120, 0) == [0]


def test_interfaces_that_are_named_get_a_device_each(monkeypatch):
    assert len(gloo._devices("lo,lo", os.getpid())) == 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError, match="none0"):
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
