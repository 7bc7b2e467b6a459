"""A Ray that is started here for one run: out of reach of this process's signals, and without what no run asks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def for_one_run() -> Iterator[None]:
    """Within this block start Ray in sessions of its own, and without three of its programs.

    Sessions keep it out of reach of a terminal and of `kill -- -GROUP`: its control store and its node manager would
    end at once, and no step could be finished without them. They end with the thread that started them all the same.

    The programs, each an interpreter that imports Ray (4 CPU-seconds together): the autoscaler's monitor, for a cluster
    that stays as it is; the log monitor, where workers write their logs themselves; and the dashboard's server, which
    Ray also starts where no dashboard is asked for.
    """
    from ray._private import node, services

    own: list[tuple[Any, str, Any]] = [
        (services, "ConsolePopen", functools.partial(services.ConsolePopen, start_new_session=True)),
        *((node.Node, start, _start_nothing) for start in ("start_monitor", "start_log_monitor", "start_api_server")),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in own]
    _set(own)
    try:
        yield
    finally:
        _set(kept)


def _set(attributes: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)


def _start_nothing(*_: Any, **__: Any) -> None:
    pass
