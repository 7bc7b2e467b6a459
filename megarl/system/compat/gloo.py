"""Groups of ranks that share gloo's devices, and collectives of gradients and parameters that copy less than torch's.

By default torch makes a device per group, whose thread wakes 100 times a second. A rank is in twenty or more groups,
and would use 3% of a core while it waits. A device is a listening socket and a thread that moves the data of all its
groups.

Torch reduces and scatters over gloo by an all-reduce of a copy of the whole input. `reduce_scatter` sends each rank
only its part and adds the parts block by block. For 135 million float32 numbers on two ranks, a rank needs 0.15
instead of 0.60 CPU-seconds, and 0.05 instead of 0.26 for `all_gather` of as many bf16 numbers (an Intel Xeon).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from megarl.system import tracing

#: Elements of a block that `reduce_scatter` receives and adds at once; two blocks fit into a core's cache.
_BLOCK = 1 << 18
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
        # Whether the caller passed options, which have devices of their own, in place of a timeout.
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


def reduce_scatter(
    output: torch.Tensor, whole: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any, async_op: bool = False
) -> Any:
    """Sum `whole` over the ranks of a gloo group; with `whole` cut into equal parts, rank r gets part r of the sum.

    Args:
        output: contiguous, of any dtype; receives rank r's part. It may be part r of `whole` itself.
        whole: contiguous, size(group) times as large as `output`; only read, except for `output` if that is a part.
        op, group, async_op: as in torch.distributed.reduce_scatter_tensor, which this function calls for other
            operations than sums and for asynchronous calls.
    """
    if async_op or op != dist.ReduceOp.SUM or group.size() == 1 or not output.numel():
        return dist.reduce_scatter_tensor(output, whole, op=op, group=group, async_op=async_op)
    rank, size = group.rank(), group.size()
    parts, result = whole.view(-1).chunk(size), output.view(-1)
    if result.data_ptr() != parts[rank].data_ptr():
        result.copy_(parts[rank])
    steps = [(shift, begin) for begin in range(0, result.numel(), _BLOCK) for shift in range(1, size)]
    blocks = [result.new_empty(min(_BLOCK, result.numel())) for _ in range(2)]
    sends: list[Any] = []

    def begin_step(number: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        shift, begin = steps[number]
        place = slice(begin, begin + _BLOCK)
        sends.append(dist.isend(parts[(rank + shift) % size][place], group=group, group_dst=(rank + shift) % size))
        received = blocks[number % 2][: len(result[place])]
        work = dist.irecv(received, group=group, group_src=(rank - shift) % size)
        return work, received, result[place]

    with _located("a sum over", group):
        current = begin_step(0)
        for number in range(len(steps)):
            following = begin_step(number + 1) if number + 1 < len(steps) else None
            work, received, sums = current
            work.wait()
            sums.add_(received)
            if following is not None:
                current = following
        for work in sends:
            work.wait()
    return None


def all_gather(whole: torch.Tensor, part: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
    """Gather the equal parts of all ranks of a gloo group into `whole`, in rank order, without a temporary copy.

    Args:
        whole: contiguous, size(group) times as large as `part`.
        part: contiguous; may be this rank's part of `whole` itself.
        group, async_op: as in torch.distributed.all_gather_into_tensor, which this function calls for asynchronous
            calls.
    """
    if async_op or group.size() == 1:
        return dist.all_gather_into_tensor(whole, part, group=group, async_op=async_op)
    rank, size = group.rank(), group.size()
    parts = whole.view(-1).chunk(size)
    works: list[Any] = []
    with _located("a gather over", group):
        for shift in range(1, size):
            source = (rank - shift) % size
            works.append(dist.isend(part.view(-1), group=group, group_dst=(rank + shift) % size))
            works.append(dist.irecv(parts[source], group=group, group_src=source))
        if part.data_ptr() != parts[rank].data_ptr():
            parts[rank].copy_(part.view(-1))
        for work in works:
            work.wait()
    return None


def _located(what: str, group: Any) -> contextlib.AbstractContextManager[None]:
    """Name this rank, the group's ranks and the phase in errors of gloo: another rank is gone, or too late."""

    def failed(phase: str) -> str:
        members = dist.get_process_group_ranks(group)
        ranks = ", ".join(map(str, members[:16]))
        return (
            f"rank {members[group.rank()]}: {what} {group.size()} ranks ({ranks}) failed in phase {phase}; the "
            "deadline is cluster.timeout_s"
        )

    return tracing.located(RuntimeError, failed)
