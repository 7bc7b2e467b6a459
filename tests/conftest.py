"""Settings of all tests."""

import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import campaigns
from tests.turns import Turns, files_alone, longest_first

# How long an example takes depends on what else the machine does.
settings.register_profile("megarl", deadline=None)
settings.load_profile("megarl")

TURNS = pytest.StashKey[Turns]()
ALONE = pytest.StashKey[set]()


def pytest_addoption(parser: pytest.Parser) -> None:
    campaigns.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of the processes of pytest-xdist
        config.stash[TURNS] = Turns(Path(tempfile.gettempdir()) / f"megarl-tests-{config.workerinput['testrunuid']}")


def pytest_unconfigure(config: pytest.Config) -> None:
    if TURNS in config.stash:
        config.stash[TURNS].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    campaigns.choose(config, items)
    config.stash[ALONE] = files_alone(items)
    if TURNS in config.stash:
        items[:] = longest_first(items, config.stash[ALONE])


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of what pytest-timeout measures
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    if TURNS not in item.config.stash:
        return (yield)
    turns, alone = item.config.stash[TURNS], item.path in item.config.stash[ALONE]
    turns.enter(alone=alone)
    try:
        return (yield)
    finally:
        if not alone or nextitem is None or nextitem.path != item.path:
            turns.leave()
