"""A Ray that is started here in sessions of its own: signals to this process's group do not reach it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def in_own_sessions() -> Iterator[None]:
    """Put what Ray starts within this block out of reach of a terminal and of `kill -- -GROUP`.

    Its control store and node manager would end at once, and no step could be finished without them. They end with the
    thread that started them all the same.
    """
    from ray._private import services as module

    services: Any = module
    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen
