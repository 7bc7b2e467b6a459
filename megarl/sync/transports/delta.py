"""Changed words to a relay on the server's host, which hands whole tensors to the server through shared memory.

An SGLang server takes whole tensors only, so the base that deltas are applied to lives in the relay (megarl/sync/
relay.py): one copy of the weights per host, whatever the number of servers there. A server that restarts is filled from
the relay without the network. The sender keeps a copy of what it sent last, to compare with.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.comm import all_gather_json, broadcast_json, group_size
from megarl.config.sync import SyncConfig
from megarl.errors import ConfigError, ServerError, WorkerError
from megarl.phase import beat
from megarl.sync.delta import WORD, Delta, apply_delta, make_delta
from megarl.sync.plan import Bucket, SyncPlan
from megarl.sync.relay import KEY_VARIABLE, RelayClient, RelayRefused
from megarl.sync.transports.base import Target, Transport

_WORTH = 0.5  # a delta of more than this part of the bucket is not worth its arithmetic


class DeltaTransport(Transport):
    """Needs a relay per host of servers.

    Args:
        relays: address of the relay by host of a server; `start_relay` makes one on this host.
        key: that the relays were started with.
        name: tells buckets of this sender from those of others.
        relay: the process of the relay that this rank started, if any; it ends with `close`.
    """

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
        self.sent_bytes = 0
        self._version = 0
        self._bases: dict[int, tuple[int, Tensor]] = {}
        self._delta: Delta | None = None
        self._base_version = -1
        self._touched: set[int] = set()
        self._relayed: dict[str, tuple[int, int]] = {}  # host -> (version, number) of the bucket it was given last
        self._clients: dict[str, RelayClient] = {}
        self._locks = {host: threading.Lock() for host in relays}

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def start(self, version: int, targets: Sequence[Target]) -> None:
        """Buckets that follow are of this version."""
        self._version, self.sent_bytes = version, 0
        self._relayed = {}

    def put(self, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Compare with what was sent last, and remember this."""
        self._delta, self._touched = None, set(range(len(bucket.entries)))
        known = self._bases.get(number)
        if known is None:
            self._base_version = -1
            self._bases[number] = self._version, flat.clone()
            return
        self._base_version, base = known
        delta, at = make_delta(base, flat)
        if delta.nbytes < _WORTH * len(flat):
            tail = not torch.equal(base[len(base) - len(delta.tail) :], delta.tail)
            self._delta, self._touched = delta, _entries_at(bucket, at, tail=tail)
            apply_delta(base, delta)
        else:
            base.copy_(flat)
        self._bases[number] = self._version, base

    def deliver(self, target: Target, number: int, bucket: Bucket, flat: Tensor) -> None:
        """To the relay, once per host; then the server is handed what it does not hold yet."""
        host = self.plan.servers[target.number].host
        try:
            with self._locks[host]:
                client = self._client(host)
                if self._relayed.get(host) != (self._version, number):
                    self._relay(client, number, bucket, flat)
                    self._relayed[host] = self._version, number
            # A server on the version before this one lacks what changed since; any other lacks everything.
            current = target.version is not None and target.version == self._base_version
            wanted = self._touched if current else set(range(len(bucket.entries)))
            if not wanted:
                return
            ranks = [
                [i for i in sorted(wanted) if self.plan.needed_by(target.number, rank, bucket.entries[i])]
                for rank in range(self.plan.servers[target.number].tp)
            ]
            ask = {"op": "handles", "bucket": self._bucket(number), "version": self._version, "ranks": ranks}
            payloads = client.call(ask)["payloads"]
        except (OSError, RelayRefused) as error:
            raise ServerError(target.api.name, target.api.url, f"relay on {host}", str(error)) from error
        payload = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
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
        """A connection that failed in the middle of a message is of no more use."""
        host = self.plan.servers[target.number].host
        with self._locks[host]:
            client = self._clients.pop(host, None)
            if client is not None:
                client.close()

    def _bucket(self, number: int) -> str:
        return f"{self.name}/{number}"

    def _client(self, host: str) -> RelayClient:
        if host not in self._clients:
            self._clients[host] = RelayClient(self.relays[host], self.key, self.deadline_s)
        return self._clients[host]

    def _relay(self, client: RelayClient, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Bring the relay's bucket to this version: by the delta if it has the base, else whole."""
        if self._delta is not None:
            header = {"op": "delta", "bucket": self._bucket(number), "base": self._base_version}
            try:
                client.call(header | {"version": self._version}, *self._delta.to_bytes())
                self.sent_bytes += self._delta.nbytes
                return
            except RelayRefused:
                pass  # another base, or none: everything
        entries = [[e.name, e.shape, e.dtype, e.offset, e.nbytes, e.source] for e in bucket.entries]
        full = {"op": "full", "bucket": self._bucket(number), "version": self._version, "entries": entries}
        client.call(full, memoryview(flat.numpy()))
        self.sent_bytes += len(flat)


def _entries_at(bucket: Bucket, words: Tensor, *, tail: bool) -> set[int]:
    """Numbers of the entries that have bytes in the changed words (in rising order), or in the bytes after the last."""
    starts = torch.tensor([entry.offset for entry in bucket.entries])
    ends = starts + torch.tensor([entry.nbytes for entry in bucket.entries])
    first = torch.searchsorted(words, starts // WORD)
    after = torch.searchsorted(words, (ends - 1) // WORD, right=True)
    touched = after > first
    if tail:
        touched |= ends > bucket.nbytes // WORD * WORD
    return set(touched.nonzero().view(-1).tolist())


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
    hosts: set[str], names: dict[int, str], config: SyncConfig, run_dir: Path
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
    if names[rank] in hosts and rank == min(other for other, name in names.items() if name == names[rank]):
        address = "127.0.0.1" if len(set(names.values())) == 1 else names[rank]
        process, port = start_relay(run_dir / "sync", key, config.timeout_s, address)
        mine.append((address, port))
    relays = {names[other]: (at[0], at[1]) for other, found in enumerate(all_gather_json(mine)) for at in found}
    return relays, key, process
