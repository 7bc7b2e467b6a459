"""Starts Ray for a single run: without programs that no run needs, and protected from signals on this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_UNASKED = ("start_monitor", "start_log_monitor", "start_api_server", "start_ray_client_server")


@contextmanager
def for_one_run() -> Iterator[None]:
    """In this block, start Ray's programs in separate sessions, and leave out programs that runs do not need.

    In separate sessions the programs do not get signals from a terminal or `kill -- -GROUP`. Such a signal would end
    the control store and the node manager at once, so that no step could finish. The programs still end with the
    thread that started them.
    """
    from ray._private import services

    popen_kwargs = [(services, "ConsolePopen", functools.partial(services.ConsolePopen, start_new_session=True))]
    with _replaced(popen_kwargs), without_unused_programs():
        yield


@contextmanager
def without_unused_programs() -> Iterator[None]:
    """In this block, start Ray without four of its programs, each of which is an interpreter that imports Ray.

    Each program takes 1 to 2 CPU-seconds: the autoscaler's monitor (the cluster does not change), the log monitor
    (workers write their own logs), the dashboard's server (Ray starts it even without a dashboard), and with
    `ray start --head` the server of Ray Client, for drivers outside the cluster.
    """
    from ray._private import node

    with _replaced([(node.Node, start, _start_nothing) for start in _UNASKED]):
        yield


@contextmanager
def _replaced(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    _set(attributes)
    try:
        yield
    finally:
        _set(originals)


def _set(attributes: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)


def _start_nothing(*_: Any, **__: Any) -> None:
    pass
