"""Small collectives over plain data: JSON values, bytes, metrics. No pickle.

All of them work without an initialised process group and in a group of one, where they return what they were given.
They move CPU tensors, so the group's backend must serve the CPU (`megarl.device.dist_backend`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WorkerError
from megarl.metrics import Metrics
from megarl.processes import LOOPBACK, address_towards

Group: TypeAlias = dist.ProcessGroup | None


def group_size(group: Group = None) -> int:
    """Ranks in `group`; 1 without an initialised process group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def all_gather_bytes(data: bytes, group: Group = None) -> list[bytes]:
    """The `data` of every rank, in group rank order, on every rank. Sizes may differ, zero included."""
    size = group_size(group)
    if size == 1:
        return [bytes(data)]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64), group=group)
    counts = [int(n) for n in lengths]
    widest = max(counts)
    if widest == 0:
        return [b""] * size
    # gloo wants equal shapes, so every rank's block is as wide as the widest.
    blocks = [torch.empty(widest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(blocks, _block(data, widest), group=group)
    return [block[:n].numpy().tobytes() for block, n in zip(blocks, counts, strict=True)]


def all_gather_json(value: Any, group: Group = None) -> list[Any]:
    """The JSON `value` of every rank, in group rank order, on every rank. NaN and infinities survive."""
    return [_decode(data) for data in all_gather_bytes(_encode(value), group)]


def all_to_all_bytes(parts: Sequence[bytes], group: Group = None) -> list[bytes]:
    """What every rank of `group` meant for this one, in group rank order; `parts` holds this rank's, one per rank."""
    if len(parts) != group_size(group):
        raise ValueError(f"{len(parts)} parts for {group_size(group)} ranks")
    if len(parts) == 1:
        return [bytes(parts[0])]
    gives = [len(part) for part in parts]
    gets = [sizes[dist.get_rank(group)] for sizes in all_gather_json(gives, group)]
    arriving = torch.empty(sum(gets), dtype=torch.uint8)
    joined = b"".join(parts)
    dist.all_to_all_single(arriving, _block(joined, len(joined)), gets, gives, group=group)
    return [part.numpy().tobytes() for part in arriving.split(gets)]


def broadcast_bytes(data: bytes | None, src: int, group: Group = None) -> bytes:
    """The `data` of global rank `src` on every rank of `group`; other ranks' `data` is ignored."""
    if group_size(group) == 1:
        if data is None:
            raise ValueError("the source of a broadcast must give data")
        return bytes(data)
    is_source = dist.get_rank() == src
    if is_source and data is None:
        raise ValueError("the source of a broadcast must give data")
    length = torch.tensor([len(data) if is_source and data is not None else 0], dtype=torch.int64)
    dist.broadcast(length, src=src, group=group)
    count = int(length)
    if count == 0:
        return b""
    block = _block(data, count) if is_source and data is not None else torch.empty(count, dtype=torch.uint8)
    dist.broadcast(block, src=src, group=group)
    return block.numpy().tobytes()


def broadcast_json(value: Any, src: int, group: Group = None) -> Any:
    """The JSON `value` of global rank `src` on every rank of `group`; other ranks' `value` is ignored."""
    is_source = group_size(group) == 1 or dist.get_rank() == src
    return _decode(broadcast_bytes(_encode(value) if is_source else None, src, group))


def reduce_metrics(metrics: Metrics, group: Group = None) -> Metrics:
    """Metrics merged over all ranks, by each metric's declared reduction, in rank order: bit-equal on all ranks.

    Ranks may hold different names (a rank without samples holds none).
    """
    total = Metrics()
    for part in all_gather_json(metrics.to_json(), group):
        total.merge(Metrics.from_json(part))
    return total


def address_for_others(machine: str, group: Group = None) -> str:
    """Address at which the ranks of other machines reach this one, loopback when there are none; collective.

    A machine's name will not do: others need not know it, and on the machine itself it may stand for a loopback
    address.

    Args:
        machine: name that tells this rank's machine from others.
        group: ranks of all machines; its first rank is on the one that MASTER_ADDR names.

    Raises:
        WorkerError: no interface of a machine leads to the first one, or of the first one to the others.
    """
    machines = all_gather_json(machine, group)
    if len(set(machines)) == 1:
        return LOOPBACK[0]
    # Every other machine reaches the first, which learns from them which of its own interfaces leads back.
    is_first = machine == machines[0]
    way = None if is_first else _way(os.environ["MASTER_ADDR"], machine)
    found = _ways(way, group)
    if is_first:
        way = _way(next(address for address in found if address), machine)
    return _ways(way, group)[dist.get_rank(group)]


def _way(other: str, machine: str) -> dict[str, str]:
    """Address of this machine that leads to `other`, or what is wrong."""
    try:
        return {"address": address_towards(other)}
    except OSError as error:
        return {"error": f"no address of {machine} leads to {other}: {error}"}


def _ways(mine: dict[str, str] | None, group: Group) -> list[str]:
    """Address that every rank found, "" where it did not look; WorkerError everywhere when one found none."""
    found = [way or {} for way in all_gather_json(mine, group)]
    for way in found:
        if "error" in way:
            raise WorkerError(f"machines cannot reach each other: {way['error']}")
    return [way.get("address", "") for way in found]


def _block(data: bytes, width: int) -> Tensor:
    """uint8 [width] that begins with `data`; the rest is unspecified."""
    block = torch.empty(width, dtype=torch.uint8)
    if data:
        block[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return block


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _decode(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))
