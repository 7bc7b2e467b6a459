"""Sends changed elements to a relay on the receiver's host, which passes them on through shared memory.

A receiver that can (`takes_changes`) writes them into its parameters itself; any other gets the changed tensors whole.
The relay (megarl/sync/relay.py) keeps the base to which deltas are applied: one copy of the weights per host, for any
number of receivers. A receiver that restarts is filled from the relay, not over the network. The sender keeps a copy of
the weights that it sent last, for comparison.
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
from torch import Tensor

from megarl.config.sync import SyncConfig
from megarl.sync.delta import Delta, make_delta, patch_header
from megarl.sync.messages import MessageClient, Refused
from megarl.sync.plan import ITEMSIZE, Bucket, SyncPlan
from megarl.sync.protocol import failure, holds_last_version
from megarl.sync.receiver import Receiver, UpdateStep
from megarl.sync.relay import KEY_VARIABLE
from megarl.sync.shared import Handle
from megarl.sync.transports.base import Transport, entries_by_rank
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError, WorkerError
from megarl.system.parents import as_parent
from megarl.system.processes import ending
from megarl.system.tracing import beat

_BUFFERS = 2  # number of a sender's buffers
_WORTH = 0.5  # if a delta exceeds this part of the bucket, the whole bucket is sent


@dataclass(frozen=True)
class _Put:
    """A bucket's bytes, and their changes since the version `base`."""

    parts: Sequence[Tensor]
    base: int = -1  # the version that the delta starts from; -1: there is no earlier version
    delta: Delta | None = None  # the changes; None: too much has changed


class DeltaTransport(Transport):
    """Sends only changed elements of the weights, through a relay process on each host of receivers.

    Args:
        relays: address of the relay on each host of receivers; `start_relay` starts one on this host.
        key: key with which the relays were started.
        name: name of this sender, unique among senders.
        run: name of the run in version tags.
        relay: the relay's process if this rank started it; `close` ends it.
    """

    live = True
    one_replica = True  # a relay stores each tensor once, so only one replica sends it

    def __init__(
        self,
        plan: SyncPlan,
        relays: dict[str, tuple[str, int]],
        key: str,
        name: str,
        run: str,
        deadline_s: float,
        relay: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._process = relay
        self.plan, self.relays, self.key, self.name, self.run = plan, relays, key, name, run
        self.deadline_s = deadline_s
        self.sent_bytes: int = 0
        self._version = 0
        self._bases: dict[int, tuple[int, Tensor]] = {}
        self._put: dict[int, _Put] = {}  # buckets that `put` has prepared in this update, by number
        self._relayed: dict[str, tuple[int, bool]] = {}  # host -> last bucket sent to it, and whether as a delta
        # receivers that still hold the version that they got last, to which a delta applies
        self._current: set[int] = set()
        self._lost: dict[str, str] = {}  # host -> why its relay gets no more messages in this update
        self._clients: dict[str, MessageClient] = {}
        self._connecting = threading.Lock()
        self._locks = {host: threading.Lock() for host in relays}

    def broken(self) -> str | None:
        """Return an error message if the relay that this rank started has ended, else None."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"the weight relay of {socket.gethostname()} ended ({ending(self._process.returncode)})"

    def start(self, version: int, receivers: Sequence[Receiver]) -> None:
        """Begin to send a version, and find out which receivers still hold the version that they got last."""
        self._version, self.sent_bytes = version, 0
        self._relayed, self._put, self._lost = {}, {}, {}
        with ThreadPoolExecutor(max(len(receivers), 1)) as pool:
            holds = pool.map(lambda receiver: holds_last_version(receiver, self.run, self.deadline_s), receivers)
            self._current = {receiver.number for receiver, current in zip(receivers, holds, strict=True) if current}

    def put(self, number: int, bucket: Bucket, parts: Sequence[Tensor]) -> None:
        """Compare the bucket with the version that was sent last, and keep it for the next comparison."""
        # The buffer of this earlier bucket was filled again, so the sender has finished sending the bucket.
        self._put.pop(number - _BUFFERS, None)
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

    def deliver(self, receiver: Receiver, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Send the bucket to the relay, once per host; the receiver then copies what it lacks from the relay."""
        host = self.plan.hosts[receiver.number]
        with self._locks[host]:
            if self._relayed.get(host, (-1, False))[0] != number:
                self._relayed[host] = number, self._relay(receiver, number, bucket)
        # A receiver with the version that the delta is based on lacks only the changes; others lack the whole bucket.
        put = self._put[number]
        delta = put.delta if receiver.number in self._current and receiver.version == put.base else None
        changed = bucket.entries if delta is None else bucket.with_partners(delta.touched)
        if not changed:
            return
        step = UpdateStep("bucket", self.deadline_s)
        if delta is not None and self._relayed[host][1] and receiver.takes_changes(step):
            header = patch_header(bucket.entries, delta)
            # A receiver that rejects the changed elements gets the whole tensors, below.
            if receiver.take_changes(self._handles(receiver, number, "patch"), header, step):
                return
        handles = self._handles(receiver, number, "handles")
        receiver.take_shared(handles, entries_by_rank(receiver, changed), None, step)

    def _handles(self, receiver: Receiver, number: int, op: str) -> list[Handle]:
        """Return handles, one for each rank of the receiver, of the shared memory in which the relay holds a bucket of
        this sender.

        Args:
            number: number of the bucket.
            op: `handles`: the whole bucket; `patch`: only its changed elements.
        """
        header = {"op": op, "version": self._version, "ranks": receiver.layout.ranks}
        handles: list[Handle] = self._call(receiver, number, header)["handles"]
        return handles

    def close(self) -> None:
        """Close the connections, and end the relay that this rank started."""
        for client in self._clients.values():
            client.close()
        self._clients = {}
        if self._process is not None:
            self._process.kill()  # safe: torch's manager process removes the relay's shared memory
            self._process.wait()

    def _call(self, receiver: Receiver, number: int, header: dict[str, Any], *bodies: memoryview) -> dict[str, Any]:
        """Send the relay on the receiver's host a message about a bucket of this sender, and return its answer."""
        host = self.plan.hosts[receiver.number]
        client = None
        try:
            if host in self._lost:
                raise Refused(self._lost[host])  # the relay failed earlier in this update: do not wait for it again
            with self._connecting:
                client = self._clients.get(host) or MessageClient(self.relays[host], self.key, self.deadline_s)
                self._clients[host] = client
            return client.call({"sender": self.name, "bucket": number} | header, *bodies)
        except (OSError, Refused) as error:
            reason = str(error)
            with self._connecting:
                if isinstance(error, OSError):
                    reason = self._lost.setdefault(host, reason)  # keep the first reason, the cause of later ones
                    if self._clients.get(host) is client:
                        # The connection may have broken in the middle of a message, so it cannot be used again.
                        self._clients.pop(host, None)
            raise failure(receiver, f"relay on {host}", reason) from error

    def _relay(self, receiver: Receiver, number: int, bucket: Bucket) -> bool:
        """Send this version of the bucket to the relay; return whether it was sent as a delta."""
        put = self._put[number]
        if put.delta is not None:
            header = {"op": "delta", "base": put.base, "version": self._version}
            if self._call(receiver, number, header, *put.delta.to_bytes())["taken"]:
                self.sent_bytes += put.delta.nbytes
                return True
        entries = [[e.name, e.shape, e.dtype, e.offset, e.nbytes, e.source] for e in bucket.entries]
        bodies = [part.numpy().data for part in put.parts]
        self._call(receiver, number, {"op": "full", "version": self._version, "entries": entries}, *bodies)
        self.sent_bytes += bucket.nbytes
        return False


def start_relay(
    folder: Path, key: str, deadline_s: float, host: str = "127.0.0.1"
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a relay process on this host, which ends with this process; return it and its port.

    Raises:
        WorkerError: the relay did not listen before the deadline.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port_file = folder / f"relay-{secrets.token_hex(4)}.port"
    command = [sys.executable, "-m", "megarl.sync.relay", host, "0", str(port_file), "--end-with-parent"]
    with (folder / "relay.log").open("ab") as log:
        process = subprocess.Popen(command, env=os.environ | as_parent() | {KEY_VARIABLE: key}, stdout=log, stderr=log)
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
    hosts: set[str],
    names: dict[int, str],
    addresses: dict[str, str],
    config: SyncConfig,
    run_dir: Path,
    world: WorkerGroup,
) -> tuple[dict[str, tuple[str, int]], str, subprocess.Popen[bytes] | None]:
    """Start a relay on every host of receivers; the first trainer rank on the host starts it. Collective.

    Returns:
        The relays' addresses by host, their key, and the relay process that this rank started, if any.

    Raises:
        ConfigError: a receiver's host has no trainer rank.
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
    rank = world.rank
    key = world.broadcast_json(secrets.token_urlsafe(32))
    started: list[tuple[str, int]] = []
    process = None
    address = addresses[names[rank]]
    if names[rank] in hosts and rank == min(other for other, name in names.items() if name == names[rank]):
        process, port = start_relay(run_dir / "sync", key, config.timeout_s, address)
        started.append((address, port))
    relays = {
        names[other]: (at[0], at[1])
        for other, addresses_of in enumerate(world.all_gather_json(started))
        for at in addresses_of
    }
    return relays, key, process
