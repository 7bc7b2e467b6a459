"""Fixtures of the tests of robots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import forked


@pytest.fixture(scope="module")
def forked_simulators() -> Iterator[None]:
    """Simulators' processes are forked in the whole module; tests/robots/envs/test_pool.py starts them as programs."""
    with forked.forked_simulators():
        yield
