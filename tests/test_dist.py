"""The multi-process harness itself."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.system.processes import has_nvidia_device
from tests import dist as harness
from tests.dist import run_distributed, wait_for_ranks


def _sum_of_ranks(scale: int) -> dict:
    total = torch.tensor(float(dist.get_rank() * scale))
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "nested": [total]}


def _one_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("rank one is unwell")
    dist.barrier()


@pytest.mark.procs
def test_results_come_back_in_rank_order():
    results = run_distributed(_sum_of_ranks, 2, 60, 10)
    assert [r["rank"] for r in results] == [0, 1]
    assert results[0]["nested"][0].item() == 10.0


def _total(tensors: list[torch.Tensor]) -> float:
    return sum(tensor.item() for tensor in tensors)


@pytest.mark.procs
def test_ranks_are_given_any_number_of_tensors():
    assert run_distributed(_total, 2, 60, [torch.tensor(1.0) for _ in range(300)]) == [300.0, 300.0]


@pytest.mark.procs
def test_error_of_one_rank_is_shown():
    with pytest.raises(AssertionError, match="rank one is unwell"):
        run_distributed(_one_rank_raises, 2, 60)


@contextmanager
def _taken_port() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as program:
        yield program.getsockname()[1]


@pytest.mark.procs
def test_ranks_that_could_not_meet_are_started_once_more(monkeypatch):
    ports = [_taken_port, harness._reserved_port]
    monkeypatch.setattr(harness, "_reserved_port", lambda: ports.pop(0)())
    assert [found["rank"] for found in run_distributed(_sum_of_ranks, 2, 60, 10)] == [0, 1]
    assert ports == []


@pytest.mark.procs
def test_ranks_that_have_met_and_fail_are_not_started_again(monkeypatch):
    ports, reserved = [], harness._reserved_port
    monkeypatch.setattr(harness, "_reserved_port", lambda: ports.append("reserved") or reserved())
    with pytest.raises(AssertionError, match="rank one is unwell"):
        run_distributed(_one_rank_raises, 2, 60)
    assert ports == ["reserved"]


def _imported_and_order() -> list:
    """What was there before this rank imported anything, and a number that follows from its hash seed."""
    return ["megarl.training.engine" in sys.modules, hash("a")]


@pytest.mark.procs
@pytest.mark.skipif(has_nvidia_device(), reason="ranks are not forked where there is a GPU")
def test_ranks_begin_with_imports_and_differ_in_the_order_of_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first, a), (second, b) = run_distributed(_imported_and_order, 2, 60)
    assert (first, second) == (True, True)
    assert a != b


def test_the_first_error_is_shown_when_all_ranks_ended_before_anybody_looked(tmp_path):
    ranks = [SimpleNamespace(exitcode=1, is_alive=lambda: False) for _ in range(2)]
    (tmp_path / "1.error").write_text("rank one is unwell")
    with pytest.raises(AssertionError, match="rank 1 failed:\nrank one is unwell"):
        wait_for_ranks(ranks, tmp_path, deadline=0.0)


def test_an_end_without_a_traceback_is_an_error(tmp_path):
    ranks = [SimpleNamespace(exitcode=-9, is_alive=lambda: False)]
    with pytest.raises(AssertionError, match=r"exit codes without a traceback: \[-9\]"):
        wait_for_ranks(ranks, tmp_path, deadline=0.0)
