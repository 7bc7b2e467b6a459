"""Keeps a process on the CPU cores that its GPU is attached to.

A machine with several sockets has a NUMA node for each of them: cores, their memory, and the PCIe links of some GPUs.
Linux takes a new page from the node of the core that first writes it, so that a process on cores of its GPU's node also
has its pinned host memory there. Copies between nodes share the link between the sockets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
#: The cores that this process had before `bind_to_gpu`; empty: the process is not bound.
_unbound: frozenset[int] = frozenset()


def bind_to_gpu(gpu: int, root: Path = _ROOT) -> bool:
    """Bind all threads of this process, and all that they start, to the cores of the NUMA node of a GPU.

    Only cores on which the process may run already are used. If there are none, or the GPU's node is unknown, nothing
    changes and the result is False; else it is True.

    Args:
        gpu: number of a GPU that this process sees.
        root: folder with the files of the kernel, `sys` and `proc`.
    """
    global _unbound  # for `on_all_cores`, since child processes inherit the binding
    allowed = frozenset(os.sched_getaffinity(0))
    cores = cores_of(gpu, root) & allowed
    if not cores:
        return False
    if cores != allowed:
        for thread in os.listdir(root / "proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(thread), cores)
        _unbound = _unbound or allowed
    return True


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """Let child processes that this thread starts in the block run on all cores that this process had before
    `bind_to_gpu`."""
    bound = os.sched_getaffinity(0) if _unbound else frozenset[int]()
    if _unbound:
        os.sched_setaffinity(0, _unbound)
    try:
        yield
    finally:
        if _unbound:
            os.sched_setaffinity(0, bound)


def cores_of(gpu: int, root: Path = _ROOT) -> frozenset[int]:
    """Return the cores of the NUMA node to which a GPU is attached; empty if the kernel or torch reports none."""
    import torch

    properties = torch.cuda.get_device_properties(gpu)
    try:
        place = [getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device")]
        address = "{:04x}:{:02x}:{:02x}.0".format(*place)
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text()  # such as "0-27,56-83"
    except (OSError, ValueError, AttributeError):  # the node is unknown: in a virtual machine it is -1, for example
        return frozenset()
    ranges = [part.split("-") for part in listed.strip().split(",") if part]
    return frozenset(core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1))
