"""Tests the links between nodes: clock offsets, and the speed of an all-reduce with each neighbour.

    n0 -- n1 -- n2 -- n3        a ring: first 0-1 and 2-3, then 1-2 and 3-0
     \\_________________/

Every pair is a separate world (nccl with GPUs, one process per GPU; else gloo), so that a failing pair does not affect
others. A node that does not join the first node in time is left out, and named.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.system.processes import write_atomically

if TYPE_CHECKING:
    from torch.distributed import Store

_ROUNDS = 5
_PINGS = 5
#: Bytes of an all-reduce with gloo, and with nccl.
_SIZES = (8 << 20, 256 << 20)


def ring(count: int) -> list[tuple[int, int]]:
    """Return the pairs of neighbours, ordered so that consecutive pairs can be measured at the same time."""
    if count < 3:
        return [(0, 1)] if count == 2 else []
    even = [(number, number + 1) for number in range(0, count - 1, 2)]
    odd = [(number, (number + 1) % count) for number in range(1, count, 2)]
    return even + odd + ([(count - 1, 0)] if count % 2 else [])


def measure(folder: Path, gpus: int, limit_s: float, local: int) -> int:
    """Run process number `local` of this node, which has one process per GPU, or one without GPUs; the first process of
    the first node writes links.json. Each wait for another node takes at most `limit_s`.
    """
    from torch.distributed import TCPStore

    from megarl.launchers.preflight import node_name
    from megarl.system.rendezvous import gloo_interface, listen

    node, nodes, each = int(os.environ["NODE_RANK"]), int(os.environ["MEGARL_NODES"]), max(1, gpus)
    command = [sys.executable, "-P", "-m", "megarl.launchers.preflight", *sys.argv[1:]]
    # the processes of the node's other GPUs
    others = [subprocess.Popen([*command, f"--local={n}"]) for n in range(1, each)] if local == 0 else []
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := gloo_interface(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    # Make timed-out waits raise, as gloo's do: otherwise nccl's watchdog ends the process, and its results are lost.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    first = node == 0 and local == 0
    limit = datetime.timedelta(seconds=limit_s)
    # Listen only on the address given to the nodes, as a run's store does; TCPStore would use every interface.
    handle: dict[str, Any] = {"master_listen_fd": listen(host, port, one_machine=nodes == 1).detach()} if first else {}
    store: Store = TCPStore(host, port, None, first, limit, wait_for_workers=False, **handle)
    if local == 0:
        store.set(f"name/{node}", node_name())
    if first:
        members = members_of(store, nodes, limit_s)
        store.set("members", json.dumps(members))
    store.wait(["members"], 2 * limit)
    members = json.loads(store.get("members"))
    clocks = _clocks(store, node, members, limit_s) if local == 0 else {}
    edges = _edges(store, members, node, local, each, gpus, limit) if node in members else []
    if local == 0:
        store.set(f"edges/{node}", json.dumps(edges))
    if first:
        store.wait([f"edges/{member}" for member in members], (len(members) + 3) * limit)
        names = {member: store.get(f"name/{member}").decode() for member in members}
        results: dict[str, Any] = {
            "nodes": [names[m] for m in members],
            "clocks": {names[m]: at for m, at in clocks.items()},
        }
        results["edges"] = [
            {"nodes": [names[members[a]], names[members[b]]], **result}
            for member in members
            for (a, b), result in json.loads(store.get(f"edges/{member}"))
            if members[a] == member
        ]
        write_atomically(folder / "links.json", json.dumps(results, indent=1))
        store.set("over", "")
    store.wait(["over"], (len(members) + 4) * limit)
    if first:
        _wait_until_others_left(store, nodes * each, limit_s)
    else:
        store.add("left", 1)
    for other in others:
        other.wait(limit_s)
    return 0


def members_of(store: Store, nodes: int, limit_s: float) -> list[int]:
    """Return the numbers of the nodes that joined within `limit_s`."""
    end = time.monotonic() + limit_s
    missing = set(range(nodes))
    while missing and time.monotonic() < end:
        missing -= {number for number in missing if store.check([f"name/{number}"])}
        time.sleep(0.05)
    return [number for number in range(nodes) if number not in missing]


def _clocks(store: Store, node: int, members: list[int], limit_s: float) -> dict[int, float]:
    """Return by how many seconds each node's clock is ahead of the first node's; empty on other nodes. The first node
    requests the time of one node after the other. The shortest of a few exchanges counts; half of its round trip is the
    error.
    """
    limit = datetime.timedelta(seconds=limit_s)
    if node != 0:
        for ping in range(_PINGS if node in members else 0):
            store.wait([f"ask/{node}/{ping}"], len(members) * limit)
            store.set(f"clock/{node}/{ping}", repr(time.time()))
        return {}
    offsets = {0: 0.0}
    for member in members[1:]:
        best = float("inf")
        for ping in range(_PINGS):
            start, wall = time.monotonic(), time.time()
            store.set(f"ask/{member}/{ping}", "")
            store.wait([f"clock/{member}/{ping}"], limit)
            took = time.monotonic() - start
            if took < best:
                best = took
                offsets[member] = float(store.get(f"clock/{member}/{ping}")) - (wall + took / 2)
    return offsets


def _edges(
    store: Store, members: list[int], node: int, local: int, each: int, gpus: int, limit: datetime.timedelta
) -> list[tuple[tuple[int, int], dict[str, Any]]]:
    """Measure an all-reduce with each neighbour of this node in a ring of the nodes `members`. Return (pair of indices
    into `members`, measurement) of this process."""
    position, gpu, edges = members.index(node), local if gpus else None, []
    for a, b in ring(len(members)):
        if position in (a, b):
            rank = (0 if position == a else each) + local
            edges.append(((a, b), _all_reduce(store, f"pair/{a}/{b}", rank, 2 * each, gpu, limit)))
    return edges


def _all_reduce(
    store: Store, name: str, rank: int, ranks: int, gpu: int | None, limit: datetime.timedelta
) -> dict[str, Any]:
    """Return the bus bandwidth in GB/s of the fastest round (2 (n - 1) / n of the bytes per second), or the error."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
    size = _SIZES[0] if gpu is None else _SIZES[1]
    best = float("inf")
    try:
        if gpu is not None:
            torch.cuda.set_device(device)
        prefixed = dist.PrefixStore(name, store)
        backend = "gloo" if gpu is None else "nccl"
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=ranks, timeout=limit)
        pair = dist.group.WORLD
        data = torch.ones(size // 4, dtype=torch.float32, device=device)
        for _ in range(_ROUNDS + 1):  # the first round opens the connections
            begun = time.perf_counter()
            dist.all_reduce(data, group=pair)
            total = float(data[0].item())  # waits for the device, so that the measured time includes the whole sum
            data.fill_(1.0)
            best = min(best, time.perf_counter() - begun)
            if total != ranks:
                return {"error": f"wrong sum: {total:g} of {ranks}"}
    except (RuntimeError, ValueError) as error:  # torch reports communication errors as RuntimeError
        return {"error": str(error).splitlines()[0][:300]}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return {"gb_per_s": round(2 * (ranks - 1) / ranks * size / best / 1e9, 3)}


def _wait_until_others_left(store: Store, processes: int, limit_s: float) -> None:
    """Wait at most 5 seconds until the other processes have left torch's key-value store, which this process hosts."""
    end = time.monotonic() + min(limit_s, 5.0)
    while store.add("left", 0) < processes - 1 and time.monotonic() < end:
        time.sleep(0.02)
