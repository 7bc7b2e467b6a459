"""One process group of one process for the tests that need no more."""

import pytest

from tests.dist import single_process


@pytest.fixture
def alone():
    """The layout of a single process."""
    return single_process()
