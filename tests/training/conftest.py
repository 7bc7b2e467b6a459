"""One process group of one process for the tests that need no more."""

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def alone():
    """torch.distributed and Megatron's groups with this process only."""
    from megarl.config.model import ParallelConfig
    from megarl.training.parallel import init_parallel, leave_parallel

    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    leave_parallel()
    torch.set_num_threads(1)
    yield init_parallel(ParallelConfig(), 60)
    leave_parallel()
    if made:
        dist.destroy_process_group()
