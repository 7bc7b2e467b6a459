"""Reward processes of these tests are forked with their imports done, in a third of the CPU time."""

from collections.abc import Iterator

import pytest

from tests.forked import forked_scorers


@pytest.fixture
def programs() -> None:
    """For tests whose reward processes, or imports of users' files, are programs, as in a run."""


@pytest.fixture(autouse=True)
def processes(request: pytest.FixtureRequest) -> Iterator[None]:
    if "programs" in request.fixturenames:
        yield
        return
    with forked_scorers():
        yield
