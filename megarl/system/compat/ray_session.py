"""A Ray that is started for one run: without what no run asks, and on this machine out of reach of its signals."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_UNASKED = ("start_monitor", "start_log_monitor", "start_api_server", "start_ray_client_server")


@contextmanager
def for_one_run() -> Iterator[None]:
    """Within this block start Ray in sessions of its own, and without the programs that no run asks.

    Sessions keep it out of reach of a terminal and of `kill -- -GROUP`: its control store and its node manager would
    end at once, and no step could be finished without them. They end with the thread that started them all the same.
    """
    from ray._private import services

    own = [(services, "ConsolePopen", functools.partial(services.ConsolePopen, start_new_session=True))]
    with _replaced(own), only_what_runs_ask():
        yield


@contextmanager
def only_what_runs_ask() -> Iterator[None]:
    """Within this block start Ray without four of its programs, each an interpreter that imports Ray.

    They take 1 to 2 CPU-seconds each: the autoscaler's monitor, for a cluster that stays as it is; the log monitor,
    where workers write their logs themselves; the dashboard's server, which Ray also starts where no dashboard is asked
    for; and on a node of `ray start --head` the server of Ray Client, for drivers outside of the cluster.
    """
    from ray._private import node

    with _replaced([(node.Node, start, _start_nothing) for start in _UNASKED]):
        yield


@contextmanager
def _replaced(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    _set(attributes)
    try:
        yield
    finally:
        _set(kept)


def _set(attributes: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)


def _start_nothing(*_: Any, **__: Any) -> None:
    pass
