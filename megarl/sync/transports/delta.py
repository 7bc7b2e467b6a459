"""Changed elements to a relay on the server's host, which hands them to the server through shared memory.

A server that has megarl's loader (compat/sglang_server/loaders) writes them into its parameters itself; those that a
run starts have it. Any other takes whole tensors only, and gets those that changed. The base that deltas are applied
to lives in the relay (megarl/sync/relay.py): one copy of the weights per host, whatever the number of servers there. A
server that restarts is filled from the relay without the network. The sender keeps a copy of what it sent last, to
compare with.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.comm import all_gather_json, broadcast_json, group_size
from megarl.compat.sglang import PATCH_LOADER
from megarl.config.sync import SyncConfig
from megarl.errors import ConfigError, ServerError, WorkerError
from megarl.phase import beat
from megarl.sync.delta import Delta, make_delta
from megarl.sync.plan import ITEMSIZE, Bucket, SyncPlan
from megarl.sync.relay import KEY_VARIABLE, RelayClient, RelayRefused
from megarl.sync.transports.base import LoaderCheck, Target, Transport

_BUFFERS = 2  # of a courier
_WORTH = 0.5  # a delta of more than this part of the bucket is not worth its arithmetic


@dataclass(frozen=True)
class _Put:
    """A bucket's bytes, the version it was compared with (-1: none), and what changed since, if that is worth it."""

    parts: Sequence[Tensor]
    base: int = -1
    delta: Delta | None = None


class DeltaTransport(Transport):
    """Needs a relay per host of servers.

    Args:
        relays: address of the relay by host of a server; `start_relay` makes one on this host.
        key: that the relays were started with.
        name: tells buckets of this sender from those of others.
        relay: the process of the relay that this rank started, if any; it ends with `close`.
    """

    live = True
    one_replica = True  # a relay holds what one sender of each tensor gave it

    def __init__(
        self,
        plan: SyncPlan,
        relays: dict[str, tuple[str, int]],
        key: str,
        name: str,
        deadline_s: float,
        relay: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._process = relay
        self.plan, self.relays, self.key, self.name, self.deadline_s = plan, relays, key, name, deadline_s
        self.sent_bytes: int = 0
        self._version = 0
        self._bases: dict[int, tuple[int, Tensor]] = {}
        self._put: dict[int, _Put] = {}  # what `put` found, by bucket
        self._relayed: dict[str, tuple[int, bool]] = {}  # host -> bucket it was given last, and whether by a delta
        self._current: set[int] = set()  # servers that hold what the last deltas led to
        self._lost: dict[str, str] = {}  # host -> why its relay is asked nothing more in this update
        self._loaders = LoaderCheck(deadline_s)
        self._clients: dict[str, RelayClient] = {}
        self._connecting = threading.Lock()
        self._locks = {host: threading.Lock() for host in relays}

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def broken(self) -> str | None:
        """The relay that this rank started has ended."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"the weight relay of {socket.gethostname()} ended (exit code {self._process.returncode})"

    def start(self, version: int, targets: Sequence[Target]) -> None:
        """Buckets that follow are of this version. Servers say what they hold: somebody else may have loaded it."""
        self._version, self.sent_bytes = version, 0
        self._relayed, self._current, self._put, self._lost = {}, set(), {}, {}
        with ThreadPoolExecutor(max(len(targets), 1)) as pool:
            current = pool.map(self._holds_what_it_was_given, targets)
            self._current = {target.number for target, holds in zip(targets, current, strict=True) if holds}

    def _holds_what_it_was_given(self, target: Target) -> bool:
        try:
            said = target.api.call("/model_info", deadline_s=self.deadline_s, phase="its version", method="GET")
        except ServerError:
            return False  # it gets everything; when it is gone, `deliver` says so
        return target.tag is not None and said.get("weight_version") == target.tag

    def put(self, number: int, bucket: Bucket, parts: Sequence[Tensor]) -> None:
        """Compare with what was sent last, and remember this."""
        self._put.pop(number - _BUFFERS, None)  # its buffer is being filled again, so everybody has it
        known = self._bases.get(number)
        if known is None:
            self._bases[number] = self._version, torch.cat(list(parts))
            self._put[number] = _Put(parts)
            return
        version, base = known
        olds = base.split([entry.nbytes for entry in bucket.entries])
        delta = make_delta(olds, parts, [ITEMSIZE[e.dtype] for e in bucket.entries], int(_WORTH * bucket.nbytes))
        if delta is None:
            for old, new in zip(olds, parts, strict=True):
                old.copy_(new)
        self._bases[number] = self._version, base
        self._put[number] = _Put(parts, version, delta)

    def deliver(self, target: Target, number: int, bucket: Bucket, flat: Tensor) -> None:
        """To the relay, once per host; then the server is handed what it does not hold yet."""
        host = self.plan.servers[target.number].host
        with self._locks[host]:
            if self._relayed.get(host, (-1, False))[0] != number:
                self._relayed[host] = number, self._relay(target, number, bucket)
        # A server on the version before this one lacks what changed since; any other lacks everything.
        put = self._put[number]
        delta = put.delta if target.number in self._current and target.version == put.base else None
        wanted = list(range(len(bucket.entries))) if delta is None else delta.touched
        by_delta = delta is not None and self._relayed[host][1]
        if not wanted or (by_delta and self._patched(target, number)):
            return
        ranks = [
            [i for i in wanted if self.plan.needed_by(target.number, rank, bucket.entries[i])]
            for rank in range(self.plan.servers[target.number].tp)
        ]
        ask = {"op": "handles", "version": self._version, "ranks": ranks}
        self._load(target, self._call(target, number, ask)["payloads"], "flattened_bucket")

    def _patched(self, target: Target, number: int) -> bool:
        """Hand over the changed elements alone; False when the server has to get whole tensors."""
        if not self._loaders.has(target.api, PATCH_LOADER):
            return False
        ask = {"op": "patch", "version": self._version, "ranks": self.plan.servers[target.number].tp}
        payloads = self._call(target, number, ask)["payloads"]
        try:
            self._load(target, payloads, PATCH_LOADER)
        except ServerError as error:
            if error.status != 200:
                raise
            self._loaders.refused(target.api, PATCH_LOADER)  # it keeps some tensor in another form
            return False
        return True

    def _load(self, target: Target, payloads: list[str], load_format: str) -> None:
        payload = {"serialized_named_tensors": payloads, "load_format": load_format, "flush_cache": False}
        target.api.call("/update_weights_from_tensor", payload, deadline_s=self.deadline_s, phase="bucket")

    def forget(self) -> None:
        """Send everything the next time."""
        self._bases = {}

    def close(self) -> None:
        """Hang up."""
        for client in self._clients.values():
            client.close()
        self._clients = {}
        if self._process is not None:
            self._process.kill()  # nothing of it outlives it but shared memory, which its manager process removes
            self._process.wait()

    def drop(self, target: Target) -> None:
        """Under this address there may be another server the next time."""
        self._loaders.forget(target.api)

    def _call(self, target: Target, number: int, header: dict[str, Any], *bodies: memoryview) -> dict[str, Any]:
        """Ask the relay on the target's host about a bucket of this sender."""
        host = self.plan.servers[target.number].host
        client = None
        try:
            if host in self._lost:
                raise RelayRefused(self._lost[host])  # the next server need not wait for the deadline, too
            with self._connecting:
                client = self._clients.get(host) or RelayClient(self.relays[host], self.key, self.deadline_s)
                self._clients[host] = client
            return client.call({"sender": self.name, "bucket": number} | header, *bodies)
        except (OSError, RelayRefused) as error:
            reason = str(error)
            with self._connecting:
                if isinstance(error, OSError):
                    reason = self._lost.setdefault(host, reason)  # of the first one: it closed the others' connection
                    if self._clients.get(host) is client:
                        self._clients.pop(host, None)  # in the middle of a message it is of no more use
            raise ServerError(target.api.name, target.api.url, f"relay on {host}", reason) from error

    def _relay(self, target: Target, number: int, bucket: Bucket) -> bool:
        """Bring the relay's bucket to this version: by the delta if it has the base (True), else whole."""
        put = self._put[number]
        if put.delta is not None:
            header = {"op": "delta", "base": put.base, "version": self._version}
            if self._call(target, number, header, *put.delta.to_bytes())["taken"]:
                self.sent_bytes += put.delta.nbytes
                return True
        entries = [[e.name, e.shape, e.dtype, e.offset, e.nbytes, e.source] for e in bucket.entries]
        bodies = [memoryview(part.numpy()) for part in put.parts]
        self._call(target, number, {"op": "full", "version": self._version, "entries": entries}, *bodies)
        self.sent_bytes += bucket.nbytes
        return False


def start_relay(
    folder: Path, key: str, deadline_s: float, host: str = "127.0.0.1"
) -> tuple[subprocess.Popen[bytes], int]:
    """A relay process on this host, which ends with this one, and its port.

    Raises:
        WorkerError: it did not listen before the deadline.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port_file = folder / f"relay-{secrets.token_hex(4)}.port"
    command = [sys.executable, "-m", "megarl.sync.relay", host, "0", str(port_file), "--end-with-parent"]
    with (folder / "relay.log").open("ab") as log:
        process = subprocess.Popen(command, env=os.environ | {KEY_VARIABLE: key}, stdout=log, stderr=log)
    end = time.monotonic() + deadline_s
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise WorkerError(f"the weight relay did not start; see {folder / 'relay.log'}")
        beat()
        time.sleep(0.05)
    port = int(port_file.read_text())
    port_file.unlink()
    return process, port


def relays_of_all(
    hosts: set[str], names: dict[int, str], addresses: dict[str, str], config: SyncConfig, run_dir: Path
) -> tuple[dict[str, tuple[str, int]], str, subprocess.Popen[bytes] | None]:
    """A relay on every host of servers, started by the first trainer rank there; collective.

    Returns:
        address by host, the key, and the process that this rank started, if it did.

    Raises:
        ConfigError: a host has servers and no trainer rank that could start its relay.
        WorkerError: a relay did not start.
    """
    away = sorted(hosts - set(names.values()))
    if away:
        raise ConfigError(
            f"no trainer rank runs on {away[0]}, so no relay can be started for the servers there",
            where="sync.transport",
            found="delta",
            allowed="auto, distributed or disk",
        )
    rank = dist.get_rank() if group_size() > 1 else 0
    key = broadcast_json(secrets.token_urlsafe(32), 0)
    mine: list[tuple[str, int]] = []
    process = None
    address = addresses[names[rank]]
    if names[rank] in hosts and rank == min(other for other, name in names.items() if name == names[rank]):
        process, port = start_relay(run_dir / "sync", key, config.timeout_s, address)
        mine.append((address, port))
    relays = {names[other]: (at[0], at[1]) for other, found in enumerate(all_gather_json(mine)) for at in found}
    return relays, key, process
