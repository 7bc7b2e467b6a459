"""A process on a receiver's host that keeps the last weights in shared memory and updates them by deltas.

    MEGARL_RELAY_KEY=... python -m megarl.sync.relay HOST PORT PORT_FILE     (port 0: a free one, written to PORT_FILE)

    trainer                                relay                                   receiver
    changed elements of bucket 3  --TCP-->  base of bucket 3 += them
    patch for receiver 0?  -------------->  handles of the changed elements, or of the bucket
    handles                      ---------------------- its own call ----------->  maps it, writes them, or copies

A bucket moves from version to version as a whole: a message is read completely before anything changes. If the relay
does not have the version that a delta starts from, it refuses the delta, and the trainer sends the whole bucket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.sync.delta import Delta, apply_delta
from megarl.sync.messages import Refused, answer
from megarl.sync.plan import ITEMSIZE, Entry
from megarl.sync.shared import handle_of, shared_buffer
from megarl.system.processes import die_with_parents

KEY_VARIABLE = "MEGARL_RELAY_KEY"
_HOST = torch.device("cpu")


@dataclass
class _Base:
    entries: list[Entry]
    flat: Tensor
    version: int

    @property
    def parts(self) -> list[Tensor]:
        return [self.flat[entry.offset : entry.offset + entry.nbytes] for entry in self.entries]


@dataclass
class _Sender:
    """The last version of one sender's buckets, by number, and the delta that it sent last, in shared memory."""

    bases: dict[int, _Base] = field(default_factory=dict)
    patch: Tensor = field(default_factory=lambda: shared_buffer(0, _HOST))
    patched: tuple[int, int, int] | None = None  # bucket number, version and bytes of the delta


class Relay:
    """Keeps the senders' buckets in shared memory of a receivers' host, and applies deltas to them."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}
        self._lock = threading.Lock()

    def handle(self, header: dict[str, Any], bodies: list[bytearray]) -> dict[str, Any]:
        """Handle one message and return the answer."""
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "full": self._full,
            "delta": self._delta,
            "patch": self._patch,
            "handles": self._handles,
        }
        with self._lock:
            name = header.pop("sender")
            if name not in self._senders:
                self._senders[name] = _Sender()
            try:
                return actions[header.pop("op")](self._senders[name], bodies=bodies, **header)
            except Refused:
                raise
            except Exception:
                # The sender's buckets here may be half updated: forget them, so that its next message must bring whole
                # buckets.
                del self._senders[name]
                raise

    def _full(
        self, sender: _Sender, bodies: list[bytearray], bucket: int, version: int, entries: list[list[Any]]
    ) -> dict[str, Any]:
        size = sum(map(len, bodies))
        base = sender.bases.get(bucket)
        if base is None or len(base.flat) != size:
            base = sender.bases[bucket] = _Base([], shared_buffer(size, _HOST), version)
        base.entries = [Entry(n, tuple(shape), dtype, *rest) for n, shape, dtype, *rest in entries]
        for part, body in zip(base.parts, bodies, strict=True):
            part.copy_(torch.frombuffer(body, dtype=torch.uint8))
        base.version = version
        return {}

    def _delta(self, sender: _Sender, bodies: list[bytearray], bucket: int, base: int, version: int) -> dict[str, Any]:
        stored = sender.bases.get(bucket)
        if stored is None or stored.version != base:
            return {"taken": False}
        delta = Delta.from_bytes(bodies)
        apply_delta(stored.parts, [ITEMSIZE[entry.dtype] for entry in stored.entries], delta)
        stored.version = version
        size, split = len(delta.distances) + len(delta.values), len(delta.distances)
        if len(sender.patch) < size:
            sender.patch = shared_buffer(size, _HOST)
        sender.patch[:split], sender.patch[split:size] = delta.distances, delta.values
        sender.patched = bucket, version, size
        return {"taken": True}

    def _patch(self, sender: _Sender, bodies: list[bytearray], bucket: int, version: int, ranks: int) -> dict[str, Any]:
        """Return handles of a bucket's changed elements, one for each of a receiver's `ranks`."""
        if sender.patched is None or sender.patched[:2] != (bucket, version):
            last_delta = "no delta"
            if sender.patched is not None:
                last_delta = "the delta of bucket {}, version {}".format(*sender.patched)
            wanted = f"bucket {bucket}, version {version}"
            raise Refused(f"the relay holds {last_delta}, but {wanted} is requested; send the delta of {wanted} first")
        flat = sender.patch[: sender.patched[2]]
        return {"handles": [handle_of(flat) for _ in range(ranks)]}

    def _handles(
        self, sender: _Sender, bodies: list[bytearray], bucket: int, version: int, ranks: int
    ) -> dict[str, Any]:
        """Return handles of a whole bucket, one for each of a receiver's `ranks`."""
        stored = sender.bases.get(bucket)
        if stored is None or stored.version != version:
            held = "nothing" if stored is None else f"version {stored.version}"
            raise Refused(
                f"the relay holds {held} of bucket {bucket}, not version {version}; send version {version} of the "
                "bucket first"
            )
        return {"handles": [handle_of(stored.flat) for _ in range(ranks)]}


def serve(relay: Relay, address: tuple[str, int], key: str, port_file: Path) -> None:
    """Listen at `address`, write the port to `port_file`, and answer the senders' messages until the process ends."""
    listener = socket.create_server(address)
    temporary = port_file.with_name(port_file.name + ".tmp")
    temporary.write_text(str(listener.getsockname()[1]))
    temporary.rename(port_file)
    answer(listener, lambda: contextlib.nullcontext(relay.handle), key, "relay")


if __name__ == "__main__":
    if "--end-with-parent" in sys.argv:
        die_with_parents()  # otherwise the relay of a killed trainer would keep the model's memory
    torch.set_num_threads(1)
    serve(Relay(), (sys.argv[1], int(sys.argv[2])), os.environ[KEY_VARIABLE], Path(sys.argv[3]))
