"""One process group of one process for the tests that need no more."""

import pytest
import torch

from tests.dist import single_process


@pytest.fixture
def alone():
    """The layout of a single process."""
    torch.set_num_threads(1)
    return single_process()
