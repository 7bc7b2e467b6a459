"""Groups of ranks that share gloo's devices. By default torch makes a device per group, whose thread wakes 100 times a
second.

A rank is in twenty or more groups, and would use 3% of a core while it waits. A device is a listening socket and a
thread that moves the data of all its groups.
"""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

#: Threads per device, as many as torch gives a group; they run its collectives.
_THREADS = 2


def share_devices() -> None:
    """Make all gloo groups of this process, including those of libraries, use the same devices; call it once."""
    if not dist.is_gloo_available():
        return
    group: Any = dist.ProcessGroupGloo
    make = group.__init__
    if make.__name__ == "on_shared_devices":
        return

    def on_shared_devices(
        self: Any, store: Any, rank: int, size: int, timeout: Any = default_pg_timeout, **settings: Any
    ) -> None:
        # the caller passed options with its own devices in place of a timeout
        given = not isinstance(timeout, datetime.timedelta)
        if given or not all(hasattr(group._Options, name) for name in settings):
            make(self, store, rank, size, timeout, **settings)
            return
        options = group._Options()
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
        options._timeout, options._threads = timeout, _THREADS * len(options._devices)
        for name, value in settings.items():  # the available options depend on the version of torch
            setattr(options, name, value)
        make(self, store, rank, size, options)

    group.__init__ = on_shared_devices


@functools.cache
def _devices(interfaces: str, process: int) -> list[Any]:
    """Return the gloo devices of a process, chosen as torch does. A forked process gets new devices."""
    make: Any = dist.ProcessGroupGloo
    if not interfaces:
        return [make.create_default_device()]
    return [make.create_device(interface=name) for name in interfaces.split(",")]
