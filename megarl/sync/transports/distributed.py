"""Any host: a broadcast from the sender to the ranks of one server, over gloo or nccl.

Each pair of sender and server has a process group of its own. A server takes the buckets of several senders in turn; in
one group over many servers two of them could each wait for a different sender, for ever, and the death of one server
would end the update of all.
"""

from __future__ import annotations

import datetime
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from megarl.errors import ServerError
from megarl.processes import address_towards
from megarl.sync.plan import Bucket, SyncPlan
from megarl.sync.transports.base import Target, Transport


@dataclass
class _Link:
    name: str
    url: str
    group: dist.ProcessGroup
    store: dist.TCPStore  # lives as long as the group


class DistributedTransport(Transport):
    """Buckets as one flat broadcast each.

    Args:
        address: of this host, as servers reach it; None: the one of the interface that reaches the server.
    """

    senders_per_stage: int | None = 1  # every sender has a connection to every server

    def __init__(self, plan: SyncPlan, device: torch.device, deadline_s: float, address: str | None = None) -> None:
        self.plan, self.device, self.deadline_s, self.address = plan, device, deadline_s, address
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._links: dict[int, _Link] = {}
        self._lock = threading.Lock()

    def buffer(self, nbytes: int) -> Tensor:
        """Memory of the device that broadcasts."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def deliver(self, target: Target, number: int, bucket: Bucket, flat: Tensor) -> None:
        """The call tells the server what comes; the broadcast runs beside it."""
        link = self._links.get(target.number)
        if link is None or link.url != target.api.url:  # a restarted server is another process under another address
            self._leave(target.number)
            link = self._connect(target)
        payload = {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [entry.dtype for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": link.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        path = "/update_weights_from_distributed"
        self._beside(target, path, payload, lambda: self._broadcast(target, link, flat))

    def drop(self, target: Target) -> None:
        """Leave the group of a server that is gone."""
        self._leave(target.number)

    def _leave(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            with self._lock:
                dist.destroy_process_group(link.group)

    def close(self) -> None:
        """Leave all groups."""
        for number in list(self._links):
            self._leave(number)

    def _broadcast(self, target: Target, link: _Link, flat: Tensor) -> None:
        try:
            dist.broadcast(flat, src=0, group=link.group)
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)
        except RuntimeError as error:
            raise ServerError(target.api.name, target.api.url, "broadcast", str(error).splitlines()[0]) from error

    def _connect(self, target: Target) -> _Link:
        """Make the group of this sender and the server: rank 0 is the sender, 1 and on are the server's ranks."""
        # Random: a server keeps the groups of trainers that are gone, and refuses a name that it has seen.
        name = f"megarl-{secrets.token_hex(8)}"
        size = 1 + self.plan.servers[target.number].tp
        timeout = datetime.timedelta(seconds=self.deadline_s)
        address = self.address
        try:
            address = address or address_towards(urlsplit(target.api.url).hostname or "")
            listener = socket.create_server((address, 0))
        except OSError as error:
            reason = f"cannot listen on {address or 'an interface that reaches the server'} (sync.address): {error}"
            raise ServerError(target.api.name, target.api.url, "group of the update", reason) from error
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        payload = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": self.backend,
        }
        made: list[dist.ProcessGroup] = []
        self._beside(
            target, "/init_weights_update_group", payload, lambda: made.append(self._join(store, name, size, timeout))
        )
        self._links[target.number] = link = _Link(name, target.api.url, made[0], store)
        return link

    def _join(self, store: dist.TCPStore, name: str, size: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
        """This sender's end of the group, made as the server makes its own (which must not be a subgroup of ours)."""
        with self._lock:
            group, _ = _new_process_group_helper(
                size, 0, [], Backend(self.backend), PrefixStore(name, store), group_name=name, timeout=timeout
            )
            _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        return group

    def _beside(self, target: Target, path: str, payload: dict[str, Any], work: Callable[[], None]) -> None:
        """Call the server and do our part of the collective at the same time; the server's own words come first."""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(target.api.call, path, payload, deadline_s=self.deadline_s, phase="bucket")
            try:
                work()
            finally:
                answer.result()
