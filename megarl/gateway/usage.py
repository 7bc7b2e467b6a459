"""Measures what the programs of a runner use: memory, CPU time, processes (Linux; elsewhere nothing)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Usage:
    """The resources that a process's descendants use together.

    Attributes:
        memory: bytes. Pages that several of them share count for each of them, unless the sum is above `shared_above`.
        cpu_s: CPU seconds, with those of children that have ended and were waited for.
        processes: processes and threads.
    """

    memory: int = 0
    cpu_s: float = 0.0
    processes: int = 0


class _Stat(NamedTuple):
    parent: int
    usage: Usage


def usage_of(roots: Iterable[int], shared_above: dict[int, int]) -> dict[int, Usage]:
    """Return the memory and CPU time that the descendants of each process use, without the process itself.

    Args:
        shared_above: process id -> bytes above which shared pages are counted once, which takes longer.
    """
    stats = dict(_stats())
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    usages = {}
    for root in roots:
        below = list(children.get(root, []))
        for pid in below:  # the loop also reaches the children that it appends
            below += children.get(pid, [])
        total = Usage()
        for pid in below:
            used = stats[pid].usage
            total.memory += used.memory
            total.cpu_s += used.cpu_s
            total.processes += used.processes
        if total.memory > shared_above.get(root, total.memory):
            total.memory = sum(_proportional(pid, stats[pid].usage.memory) for pid in below)
        usages[root] = total
    return usages


def _stats() -> Iterator[tuple[int, _Stat]]:
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                # The list begins with field 3 of proc(5), after the name in parentheses. Fields 4, 14 to 17, 20 and 24
                # are read.
                fields = file.read().rpartition(b")")[2].split()
                ticks = sum(int(field) for field in fields[11:15])
                yield (
                    int(name),
                    _Stat(int(fields[1]), Usage(int(fields[21]) * _PAGE, ticks / _TICKS, int(fields[17]))),
                )


def _proportional(pid: int, otherwise: int) -> int:
    """Return a process's memory in bytes, with its share of shared pages."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return otherwise
