from collections.abc import Iterator

import pytest

from tests.forked import forked_scorers


@pytest.fixture
def forked() -> Iterator[None]:
    """For tests whose processes of tools are forked with their imports done; in the others they are programs."""
    with forked_scorers():
        yield
