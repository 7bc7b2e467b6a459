"""The multi-process harness itself."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

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


@pytest.mark.procs
def test_error_of_one_rank_is_shown():
    with pytest.raises(AssertionError, match="rank one is unwell"):
        run_distributed(_one_rank_raises, 2, 60)


def test_the_first_error_is_shown_when_all_ranks_ended_before_anybody_looked(tmp_path):
    ranks = [SimpleNamespace(exitcode=1, is_alive=lambda: False, join=lambda timeout: None) for _ in range(2)]
    (tmp_path / "1.error").write_text("rank one is unwell")
    with pytest.raises(AssertionError, match="rank 1 failed:\nrank one is unwell"):
        wait_for_ranks(ranks, tmp_path, deadline=0.0)


def test_an_end_without_a_traceback_is_an_error(tmp_path):
    ranks = [SimpleNamespace(exitcode=-9, is_alive=lambda: False, join=lambda timeout: None)]
    with pytest.raises(AssertionError, match=r"exit codes without a traceback: \[-9\]"):
        wait_for_ranks(ranks, tmp_path, deadline=0.0)
