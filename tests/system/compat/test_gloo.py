"""Groups of ranks that share one device of gloo, and what they say to each other on it."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.runtime.health import failure_of
from megarl.system.compat import gloo
from megarl.system.errors import WorkerError
from megarl.system.tracing import phase
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


def test_a_rank_that_waits_in_vain_for_a_gradient_names_itself_its_group_and_phase(monkeypatch):
    """No other rank is needed: torch's calls of one rank whose peer never comes raise this error."""

    class Late:
        def wait(self) -> None:
            raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    for name in ("isend", "irecv"):
        monkeypatch.setattr(gloo.dist, name, lambda *arguments, **options: Late())
    monkeypatch.setattr(gloo.dist, "get_process_group_ranks", lambda group: [4, 6])
    values = torch.zeros(4)
    calls = {
        "a sum over": lambda: gloo.reduce_scatter(values[:2], values, group=group),
        "a gather over": lambda: gloo.all_gather(values, values[:2], group=group),
    }
    for name, call in calls.items():
        with phase("actor_train"), pytest.raises(WorkerError) as raised:
            call()
        assert str(raised.value).startswith(f"rank 4: {name} 2 ranks (4, 6) failed in phase actor_train; ")
        assert failure_of(raised.value, 4).peer_lost


def after_a_fork(_: int) -> int:
    """Exit code of a child that makes a world of its own: 0 where that works."""
    dist.barrier()
    child = os.fork()
    if not child:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=20))
        group.allreduce([torch.ones(1)]).wait()
        while not loops():  # the thread of a device names itself when it first runs
            time.sleep(0.01)
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


class GroupOfTorch214:
    """The constructor of torch 2.14's ProcessGroupGloo, and how torch 2.14 calls it."""

    class _Options:
        enable_reconfigure = False

    create_default_device = staticmethod(object)

    def __init__(
        self, store: object, rank: int, size: int, timeout: object = None, enable_reconfigure: bool = False
    ) -> None:
        if isinstance(timeout, self._Options):
            assert enable_reconfigure is False  # the constructor with options takes no further argument
            enable_reconfigure = timeout.enable_reconfigure
        self.timeout, self.enable_reconfigure = timeout, enable_reconfigure


@pytest.mark.parametrize("value", [False, True])
def test_keywords_of_later_versions_of_torch_are_passed_on(monkeypatch, value: bool) -> None:
    group = type("ProcessGroupGloo", (GroupOfTorch214,), {})
    monkeypatch.setattr(dist, "ProcessGroupGloo", group)
    gloo.share_devices()
    gloo._devices.cache_clear()
    try:
        made = group("store", 0, 2, timeout=datetime.timedelta(seconds=7), enable_reconfigure=value)
        given = group("store", 0, 2, group._Options())
    finally:
        gloo._devices.cache_clear()
    assert (made.enable_reconfigure, made.timeout._timeout) == (value, datetime.timedelta(seconds=7))
    assert len(made.timeout._devices) == 1
    assert not hasattr(given.timeout, "_devices")


def test_keywords_that_options_cannot_hold_are_left_to_torch(monkeypatch) -> None:
    class Group(GroupOfTorch214):
        def __init__(self, *place: object, timeout: object = None, later: int = 0) -> None:
            super().__init__(*place, timeout)  # type: ignore[arg-type]
            self.later = later

    monkeypatch.setattr(dist, "ProcessGroupGloo", Group)
    gloo.share_devices()
    made = Group("store", 0, 2, timeout=datetime.timedelta(seconds=7), later=3)
    assert (made.later, made.timeout) == (3, datetime.timedelta(seconds=7))


def parts(rank: int) -> list[torch.Tensor]:
    """What a rank brings: numbers whose sums are exact, of two blocks and a bit, and of one number for each rank."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randint(-1000, 1000, (3 * count,), generator=draw).float() for count in (2 * (1 << 18) + 5, 1)]


def lean(_: int) -> list[bool]:
    """Whether sums and gathered parts are those of all ranks, written into the input itself and beside it."""
    rank, equal = dist.get_rank(), []
    for number in range(2):
        expected = sum((parts(other)[number] for other in range(3)), torch.zeros(()))
        for inside in (True, False):
            whole = parts(rank)[number]
            output = whole.chunk(3)[rank] if inside else torch.empty_like(whole.chunk(3)[rank])
            assert gloo.reduce_scatter(output, whole, group=dist.group.WORLD) is None
            equal.append(torch.equal(output, expected.chunk(3)[rank]))
            gathered = whole if inside else torch.empty_like(whole)
            assert gloo.all_gather(gathered, output, group=dist.group.WORLD) is None
            equal.append(torch.equal(gathered, expected))
    return equal


@pytest.mark.procs
def test_sums_and_parts_are_those_of_all_ranks():
    assert run_distributed(lean, 3, 120, 0) == [[True] * 8] * 3
