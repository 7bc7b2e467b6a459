"""Settings of all tests."""

import gc
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import campaigns, fork_servers, workers
from tests.turns import SINGLY, FirstCollects, OneTakesTheWide, Turns, kinds_of, longest_first, write_kinds

# How long an example takes depends on what else the machine does. The examples are the same in every run: one that
# fails belongs to a change of the code or of the test.
settings.register_profile(
    "megarl",
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("megarl")

TURNS = pytest.StashKey[Turns]()
KINDS = pytest.StashKey[dict[Path, str]]()
COLLECTING = pytest.StashKey[FirstCollects]()
RUN = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    campaigns.add_option(parser)


@pytest.hookimpl(trylast=True)  # after the marks `parametrize`
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    campaigns.leave_out(metafunc)


def shared_file(run: str) -> Path:
    """The path that files of all processes of a run of pytest-xdist are called after."""
    return Path(tempfile.gettempdir()) / f"megarl-tests-{run}"


@pytest.fixture(scope="module")
def forked_ray() -> Iterator[None]:
    """Runs of this module fork the workers of the Ray that they start."""
    from tests.ray_forks.clusters import offered

    with offered():
        yield


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")  # one of the processes of pytest-xdist
    if is_worker or not config.getoption("numprocesses", None):
        compute_in_one_thread()
    if is_worker:
        config.stash[TURNS] = Turns(shared_file(config.workerinput["testrunuid"]))
        config.stash[COLLECTING] = FirstCollects(shared_file(f"{config.workerinput['testrunuid']}.collected"))
        config.pluginmanager.register(workers.FewReports())
        gc.disable()  # what collecting makes stays to the end: looking for garbage in it takes a fifth of its time


def compute_in_one_thread() -> None:
    """Load torch with one thread: a tiny product takes ten times as long where threads wait for a core that is busy."""
    with pytest.MonkeyPatch.context() as patch:  # what tests start keeps the environment
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            patch.setenv(name, "1")
        import torch
    torch.set_num_threads(1)  # where it had been loaded


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    if config.getvalue("dist") == "loadfile":
        workers.fork_workers(config.pluginmanager.getplugin("dsession").nodemanager.testrunuid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneTakesTheWide | None:
    if config.getvalue("dist") != "loadfile":
        return None
    config.stash[RUN] = config.pluginmanager.getplugin("dsession").nodemanager.testrunuid
    return OneTakesTheWide(config, log, shared_file(f"{config.stash[RUN]}.kinds"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if TURNS in config.stash:
        config.stash[TURNS].close()
    if RUN in config.stash:  # the process that the others have ended before
        fork_servers.remove_files(config.stash[RUN])
        shared_file(f"{config.stash[RUN]}.collected").unlink(missing_ok=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    campaigns.choose(config, items)
    config.stash[KINDS] = kinds_of(items)
    if TURNS in config.stash:
        items[:] = longest_first(items, config.stash[KINDS])
        write_kinds(shared_file(f"{config.workerinput['testrunuid']}.kinds"), items, config.stash[KINDS])


def pytest_collection_finish(session: pytest.Session) -> None:
    if COLLECTING in session.config.stash:
        session.config.stash[COLLECTING].leave()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of what pytest-timeout measures
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    if TURNS not in item.config.stash:
        return (yield)
    turns, kind = item.config.stash[TURNS], item.config.stash[KINDS][item.path]
    turns.enter(kind)
    try:
        return (yield)
    finally:
        # What a file that runs singly starts lives as long as the file.
        if kind not in SINGLY or nextitem is None or nextitem.path != item.path:
            turns.leave()
