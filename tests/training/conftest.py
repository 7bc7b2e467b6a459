"""One process group of one process for the tests that need no more."""

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def alone():
    """torch.distributed and Megatron's groups with this process only."""
    from megarl.config.model import ParallelConfig
    from megarl.training import parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if parallel.current_layout() is None:
        parallel.leave_parallel()  # groups that an earlier test made without init_parallel
    torch.set_num_threads(1)
    return parallel.init_parallel(ParallelConfig(), 60)
