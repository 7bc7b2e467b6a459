"""The multi-process harness itself."""

import pytest
import torch
import torch.distributed as dist

from tests.dist import run_distributed


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
