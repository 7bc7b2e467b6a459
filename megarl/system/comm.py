"""Communication between ranks: a `WorkerGroup` is a set of ranks with the collectives between them, without pickle.

    team (one torch.distributed world)       world = team_world(deadline_s)
    replicas, shards, stages of it           a WorkerGroup each, see `megarl.training.parallel.Layout`

Nothing outside this module uses torch's default group: code that communicates gets a group as argument. Plain data
(JSON values, bytes, metrics) travel in CPU tensors, so the group's backend must serve the CPU
(`megarl.system.device.dist_backend`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.system import tracing
from megarl.system.compat.gloo import share_devices
from megarl.system.errors import WorkerError
from megarl.system.metric_table import MetricTable
from megarl.system.metrics import Metrics
from megarl.system.processes import LOOPBACK, address_towards
from megarl.system.store import SharedStore

share_devices()

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
#: Two ranks all-reduce small tensors by one exchange: 0.4 ms for 16 KB on two cores of an AMD EPYC, where gloo's
#: reduction takes 0.8 (docs/benchmarks.md, measured once). The sum of two numbers is the same in either order.
_BOTH: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}
_SMALL = 1 << 19  # bytes; for larger tensors an exchange takes as long as gloo's reduction
#: The metric names that the ranks of each process group have exchanged; all its `WorkerGroup`s share a table.
_TABLES: WeakKeyDictionary[dist.ProcessGroup, MetricTable] = WeakKeyDictionary()
_TOO_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


class WorkerGroup:
    """A group of ranks that communicate. Rank numbers in methods are ranks within the group, except in `subgroup`.

    In a group of one rank, collectives return their input. If other ranks do not join a collective within the
    deadline, it raises a WorkerError that names the group, this rank and the phase.

    Args:
        name: name of the group, for messages.
        process_group: torch's group; None: only this process.
        deadline_s: deadline of every collective in seconds, only for messages; torch enforces it.

    Attributes:
        rank, size: this process's rank in the group, and the number of ranks.
        ranks: the members' ranks in their team's world.
    """

    def __init__(self, name: str, process_group: dist.ProcessGroup | None, deadline_s: float) -> None:
        self.name, self.deadline_s = name, deadline_s
        self._process_group = process_group
        self.rank = 0 if process_group is None else process_group.rank()
        self.size = 1 if process_group is None else process_group.size()
        self.ranks = (0,) if process_group is None else tuple(dist.get_process_group_ranks(process_group))

    @classmethod
    def alone(cls) -> WorkerGroup:
        """Return a group of only this process, with or without torch.distributed."""
        return cls("this process", None, 0.0)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of torch.distributed. Raise ValueError if the worker group has only this process."""
        if self._process_group is None:
            raise ValueError(
                f"the worker group {self.name!r} has only this process, so it has no process group of "
                "torch.distributed; call the methods of WorkerGroup, which also work with one process"
            )
        return self._process_group

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name!r}, rank {self.rank} of {self.size})"

    # -- groups of some ranks -----------------------------------------------------------------------------------------

    def subgroup(self, ranks: Sequence[int], name: str) -> WorkerGroup | None:
        """Return a new group of `ranks` of the team's world; None on all other ranks. The caller closes the group.

        Collective over the whole team: torch names a group by the number of groups that each rank has created, so all
        ranks must create all groups in the same order.
        """
        limit = datetime.timedelta(seconds=self.deadline_s)
        made = dist.new_group(list(ranks), timeout=limit)
        return WorkerGroup(name, made, self.deadline_s) if self.ranks[self.rank] in ranks else None

    def close(self) -> None:
        """Leave the group and free its sockets and threads. A second call does nothing. Not collective, but a
        collective that another rank of the group is still running may fail.
        """
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)
            self._process_group = None

    def store(self) -> SharedStore:
        """Return the key-value store of the team's world, which a thread of the world's rank 0 serves. All groups share
        this store, so each user begins its keys with a name of its own.
        """
        store = dist.PrefixStore("megarl", dist.distributed_c10d._get_default_store())
        who = f"{self._member(self.rank)} of {self.name}"
        return SharedStore(store, who, f"{self.deadline_s:g} s, cluster.timeout_s")

    # -- tensors, in place --------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with self._deadline("the other ranks"):
                dist.barrier(group=self.process_group)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Overwrite `tensor` with the sum or maximum (undefined with NaN) over all ranks and return it."""
        if self.size == 2 and tensor.device.type == "cpu" and tensor.nbytes <= _SMALL:
            # Outside of this mode, `out=` rejects inference tensors and tensors that require gradients. dist.all_reduce
            # accepts both.
            with torch.inference_mode():
                _BOTH[op](*self.all_gather(tensor), out=tensor)
            return tensor
        if self.size > 1:
            with self._deadline("a reduction"):
                dist.all_reduce(tensor, op=_OPS[op], group=self.process_group)
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite `tensor` with the tensor of rank `src` and return it."""
        if self.size > 1:
            with self._deadline(f"a broadcast of {self._member(src)}"):
                dist.broadcast(tensor, src=self.ranks[src], group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the `tensor` of every rank, in rank order. All tensors have the same shape."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._deadline("the tensors of the other ranks"):
            dist.all_gather(parts, tensor, group=self.process_group)
        return parts

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send `tensor` to rank `dst`, which calls `receive`."""
        with self._deadline(f"{self._member(dst)} to receive a tensor"):
            dist.send(tensor, group=self.process_group, group_dst=dst)

    def receive(self, into: Tensor, src: int) -> Tensor:
        """Overwrite `into` with the tensor that rank `src` sends and return it."""
        with self._deadline(f"a tensor of {self._member(src)}"):
            dist.recv(into, group=self.process_group, group_src=src)
        return into

    # -- plain data ---------------------------------------------------------------------------------------------------

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank, in rank order, on every rank. Sizes may differ and may be 0."""
        if self.size == 1:
            return [bytes(data)]
        counts = [int(n) for n in self.all_gather(torch.tensor([len(data)], dtype=torch.int64))]
        widest = max(counts)
        if widest == 0:
            return [b""] * self.size
        # gloo needs equal shapes, so every rank's block is as wide as the widest.
        blocks = self.all_gather(_block(data, widest))
        return [block[:n].numpy().tobytes() for block, n in zip(blocks, counts, strict=True)]

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the JSON `value` of every rank, in rank order, on every rank. NaN and infinities are preserved."""
        return [_decode(data) for data in self.all_gather_bytes(_encode(value))]

    def all_to_all_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send `parts[i]` to rank i and return the parts sent to this rank, in rank order."""
        if len(parts) != self.size:
            raise ValueError(f"all_to_all needs one part for each of {self.size} ranks, got {len(parts)}")
        if self.size == 1:
            return [bytes(parts[0])]
        gives = [len(part) for part in parts]
        gets = [sizes[self.rank] for sizes in self.all_gather_json(gives)]
        arriving = torch.empty(sum(gets), dtype=torch.uint8)
        joined = b"".join(parts)
        with self._deadline("the parts of the other ranks"):
            dist.all_to_all_single(arriving, _block(joined, len(joined)), gets, gives, group=self.process_group)
        return [part.numpy().tobytes() for part in arriving.split(gets)]

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        """Return the `data` of rank `src` on every rank; other ranks' `data` is ignored."""
        is_source = self.rank == src
        if is_source and data is None:
            raise ValueError("the source rank of a broadcast must pass data")
        if self.size == 1:
            return bytes(data or b"")
        count = int(self.broadcast(torch.tensor([len(data) if is_source and data else 0], dtype=torch.int64), src))
        if count == 0:
            return b""
        block = _block(data, count) if is_source and data else torch.empty(count, dtype=torch.uint8)
        return self.broadcast(block, src).numpy().tobytes()

    def broadcast_json(self, value: Any, src: int = 0) -> Any:
        """Return the JSON `value` of rank `src` on every rank; other ranks' `value` is ignored."""
        return _decode(self.broadcast_bytes(_encode(value) if self.rank == src else None, src))

    def reduce_metrics(self, metrics: Metrics) -> Metrics:
        """Merge metrics over all ranks by each metric's declared reduction. Results are bitwise equal on all ranks.
        Ranks may have metrics of different names; a rank without samples has none.

        Names are exchanged once (`MetricTable`). Later calls move 32 bytes per name up and down a tree of ranks. Raise
        ValueError on every rank if ranks have a name with different reductions.
        """
        if self.size == 1:
            return Metrics.from_json(metrics.to_json())
        table = _TABLES.setdefault(self.process_group, MetricTable())
        while True:
            row = self._combined(table.row(metrics), table.combine)
            if (reduced := table.metrics(row)) is not None:
                return reduced
            for entries in self.all_gather_json(table.unknown(metrics)):
                table.add(map(tuple, entries))

    def _combined(self, row: Tensor, combine: Callable[[Tensor, Tensor], None]) -> Tensor:
        """Merge the rows of all ranks along a binomial tree by `combine(row, other)`, in place, and return the result
        on every rank.

        The tree needs 2 log2(size) messages one after the other, while gloo's reduction needs 2 (size - 1).
        """
        step = 1
        while step < self.size and not self.rank & step:
            if (other := self.rank + step) < self.size:
                combine(row, self.receive(torch.empty_like(row), other))
            step *= 2
        if self.rank:
            self.send(row, self.rank - step)
        return self.broadcast(row)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _member(self, rank: int) -> str:
        return f"rank {self.ranks[rank]}"

    @contextlib.contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if _TOO_LATE.search(str(error)) is None:
                raise
            raise WorkerError(
                f"rank {self.ranks[self.rank]} of {self.name} timed out waiting for {what} in phase "
                f"{tracing.current()} (deadline {self.deadline_s:g} s, cluster.timeout_s): {error}"
            ) from error


def single_world(backend: str, deadline_s: float) -> WorkerGroup:
    """Return a world of size 1, for a process without a team: the world that it has joined, else a new one."""
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return team_world(deadline_s)


def team_world(deadline_s: float) -> WorkerGroup:
    """Return the group of all ranks of this process's team; only this function uses torch's default group."""
    if dist.group.WORLD is None:
        raise RuntimeError("torch.distributed is not initialised: this process has joined no team yet")
    return WorkerGroup("the world", dist.group.WORLD, deadline_s)


def address_for_others(machine: str, group: WorkerGroup) -> str:
    """Return the address at which ranks on other machines reach this one; loopback when all are on one machine.
    Collective.

    A machine's name is not enough: others may not resolve it, and on the machine itself it may be a loopback address.
    Raise WorkerError if a machine has no route to the first machine, or the first machine has none back.

    Args:
        machine: unique name of this rank's machine.
        group: ranks of all machines; its first rank is on the machine that MASTER_ADDR names.
    """
    machines = group.all_gather_json(machine)
    if len(set(machines)) == 1:
        return LOOPBACK[0]
    # All other machines connect to the first machine; their addresses then show it which of its interfaces leads back.
    is_first = machine == machines[0]
    way = None if is_first else _route(os.environ["MASTER_ADDR"], machine)
    addresses = _routes(way, group)
    if is_first:
        way = _route(next(address for address in addresses if address), machine)
    return _routes(way, group)[group.rank]


def _route(other: str, machine: str) -> dict[str, str]:
    """Return this machine's address on the route to `other`, or the error."""
    try:
        return {"address": address_towards(other)}
    except OSError as error:
        return {"error": f"no address of {machine} leads to {other}: {error}"}


def _routes(mine: dict[str, str] | None, group: WorkerGroup) -> list[str]:
    """Return the address that each rank found with `_route`, empty for ranks that passed None. If a rank passes an
    error, all ranks raise WorkerError."""
    routes = [way or {} for way in group.all_gather_json(mine)]
    for way in routes:
        if "error" in way:
            raise WorkerError(
                f"machines cannot reach each other: {way['error']}; check the network between them and MASTER_ADDR"
            )
    return [way.get("address", "") for way in routes]


def _block(data: bytes, width: int) -> Tensor:
    """Return a tensor uint8 [width] that begins with `data`; the remaining bytes are unspecified."""
    block = torch.empty(width, dtype=torch.uint8)
    if data:
        block[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return block


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _decode(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))
