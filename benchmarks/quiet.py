"""How much of the machine something else took while a program was measured."""

from __future__ import annotations

import os
import resource
import time
from types import TracebackType

import psutil


class OthersShare:
    """Watches the machine while a block runs its programs as child processes that end before the block does.

    Attributes:
        share: after the block: CPU time that neither the children nor this process used, or that the hypervisor gave to
            other guests, as a share of what all cores had to give. Wall seconds are worth quoting when it is near 0.
    """

    share = 0.0

    def __enter__(self) -> OthersShare:
        self._start = (_busy(), _own(), time.perf_counter())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        busy, own, start = self._start
        capacity = (time.perf_counter() - start) * (os.cpu_count() or 1)
        self.share = max(0.0, (_busy() - busy) - (_own() - own)) / capacity


def _busy() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
