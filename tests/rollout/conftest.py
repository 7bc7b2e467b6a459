import pytest

from tests.dist import single_process as start


@pytest.fixture(scope="module")
def single_process():
    """Megatron's parallel state for one process."""
    start()
