"""A process on a receiver's host that keeps the last weights in shared memory and brings them forward by deltas.

    MEGARL_RELAY_KEY=... python -m megarl.sync.relay HOST PORT PORT_FILE     (port 0: a free one, written to PORT_FILE)

    trainer                                relay                                   receiver
    changed elements of bucket 3  --TCP-->  base of bucket 3 += them
    patch for receiver 0?  -------------->  handles of the changed elements, or of the bucket
    handles                      ---------------------- its own call ----------->  maps it, writes them, or copies

A bucket moves from version to version whole: a message is read to its end before anything changes. The base must be
the one that the delta was made from; otherwise the answer says so and the trainer sends everything. Both sides prove
that they know the run's key before anything is said; messages are JSON and raw bytes, never pickles.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.processes import kill_with_parent
from megarl.sync.delta import Delta, apply_delta
from megarl.sync.plan import ITEMSIZE, Entry
from megarl.sync.shared import handle_of, shared_buffer

KEY_VARIABLE = "MEGARL_RELAY_KEY"
_HOST = torch.device("cpu")
_NONCE = 32
_PROOF_S = 30.0
_LIMIT = 64 << 30  # bytes of a message; more is not a message of ours


class RelayRefused(Exception):
    """The relay answered that it cannot do what was asked."""


def send_message(sock: socket.socket, header: dict[str, Any], *bodies: memoryview, end: float | None = None) -> None:
    """A JSON header, and bytes after it, before `end` on the monotonic clock if that is given."""
    text = json.dumps(header | {"bytes": [len(body) for body in bodies]}).encode()
    parts: list[bytes | memoryview] = [len(text).to_bytes(4, "little") + text, *bodies]
    for part in parts:
        _wait_until(sock, end)
        sock.sendall(part)


def read_message(sock: socket.socket, end: float | None = None) -> tuple[dict[str, Any], list[bytearray]]:
    """The counterpart of `send_message`.

    Raises:
        ConnectionError: the other side is gone.
        TimeoutError: not all of it was there before `end`.
    """
    header = json.loads(_read(sock, int.from_bytes(_read(sock, 4, end), "little"), end))
    return header, [_read(sock, size, end) for size in header.pop("bytes")]


def _wait_until(sock: socket.socket, end: float | None) -> None:
    """A socket's timeout is per call; shrinking it before each makes the deadline that of a whole message."""
    left = None if end is None else end - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError("no whole answer before the deadline")
    sock.settimeout(left)


def _read(sock: socket.socket, size: int, end: float | None = None) -> bytearray:
    if not 0 <= size <= _LIMIT:
        raise ConnectionError(f"a message of {size} bytes")
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        _wait_until(sock, end)
        count = sock.recv_into(view[got:])
        if count == 0:
            raise ConnectionError("the other side closed the connection")
        got += count
    return data


class RelayClient:
    """The trainer's end. Calls are serialised; each has the deadline `deadline_s`.

    Raises:
        ConnectionError: who answers does not know the key.
        OSError: nobody answers.
    """

    def __init__(self, address: tuple[str, int], key: str, deadline_s: float) -> None:
        self._sock = socket.create_connection(address, timeout=deadline_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock, self._deadline_s = threading.Lock(), deadline_s
        end = time.monotonic() + deadline_s
        try:
            nonce = secrets.token_bytes(_NONCE)
            self._sock.sendall(_proof(key, b"trainer", _read(self._sock, _NONCE, end)) + nonce)
            if not hmac.compare_digest(_read(self._sock, _NONCE, end), _proof(key, b"relay", nonce)):
                raise ConnectionError("who answers is not this run's relay")
        except OSError:
            self._sock.close()
            raise

    def call(self, header: dict[str, Any], *bodies: memoryview) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises:
            RelayRefused: the relay could not do it.
            OSError: the relay is gone, or did not answer in time; the connection is of no more use.
        """
        with self._lock:
            end = time.monotonic() + self._deadline_s
            try:
                send_message(self._sock, header, *bodies, end=end)
                answer, _ = read_message(self._sock, end)
            except OSError:
                self._sock.close()  # the answer may still come, and the next call would take it for its own
                raise
        if "refused" in answer:
            raise RelayRefused(answer["refused"])
        return answer

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


def _proof(key: str, who: bytes, nonce: bytes | bytearray) -> bytes:
    """What only those can answer who know the key; `who` keeps one side's answer from serving as the other's."""
    return hmac.digest(key.encode(), who + nonce, "sha256")


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
    """Buckets by number, and the last delta in shared memory: its bytes, its bucket and version."""

    bases: dict[int, _Base] = field(default_factory=dict)
    patch: Tensor = field(default_factory=lambda: shared_buffer(0, _HOST))
    patched: tuple[int, int, int] | None = None  # bucket, version, bytes


class Relay:
    """What senders gave, in shared memory."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}
        self._lock = threading.Lock()

    def handle(self, header: dict[str, Any], bodies: list[bytearray]) -> dict[str, Any]:
        """Answer one message."""
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "full": self._full,
            "delta": self._delta,
            "patch": self._patch,
            "handles": self._handles,
        }
        with self._lock:
            sender = self._senders.setdefault(header.pop("sender"), _Sender())
            return actions[header.pop("op")](sender, bodies=bodies, **header)

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
        held = sender.bases.get(bucket)
        if held is None or held.version != base:
            return {"taken": False}
        delta = Delta.from_bytes(bodies)
        apply_delta(held.parts, [ITEMSIZE[entry.dtype] for entry in held.entries], delta)
        held.version = version
        size, split = len(delta.distances) + len(delta.values), len(delta.distances)
        if len(sender.patch) < size:
            sender.patch = shared_buffer(size, _HOST)
        sender.patch[:split], sender.patch[split:size] = delta.distances, delta.values
        sender.patched = bucket, version, size
        return {"taken": True}

    def _patch(self, sender: _Sender, bodies: list[bytearray], bucket: int, version: int, ranks: int) -> dict[str, Any]:
        """Handles of the changed elements, one for each of the `ranks` of a receiver."""
        if sender.patched is None or sender.patched[:2] != (bucket, version):
            raise RelayRefused(f"the last changes are those of {sender.patched}, not of {(bucket, version)}")
        flat = sender.patch[: sender.patched[2]]
        return {"handles": [handle_of(flat) for _ in range(ranks)]}

    def _handles(
        self, sender: _Sender, bodies: list[bytearray], bucket: int, version: int, ranks: int
    ) -> dict[str, Any]:
        """Handles of the whole bucket."""
        held = sender.bases.get(bucket)
        if held is None or held.version != version:
            raise RelayRefused(f"version {None if held is None else held.version} instead of {version}")
        return {"handles": [handle_of(held.flat) for _ in range(ranks)]}


def serve(relay: Relay, address: tuple[str, int], key: str, port_file: Path) -> None:
    """Answer trainers until the process ends; each connection has a thread."""
    listener = socket.create_server(address)
    temporary = port_file.with_name(port_file.name + ".tmp")
    temporary.write_text(str(listener.getsockname()[1]))
    temporary.rename(port_file)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_converse, args=(relay, sock, key), daemon=True).start()


def _converse(relay: Relay, sock: socket.socket, key: str) -> None:
    with sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end = time.monotonic() + _PROOF_S
            nonce = secrets.token_bytes(_NONCE)
            sock.sendall(nonce)
            if not hmac.compare_digest(_read(sock, _NONCE, end), _proof(key, b"trainer", nonce)):
                return
            sock.sendall(_proof(key, b"relay", _read(sock, _NONCE, end)))
            while True:
                header, bodies = read_message(sock)
                try:
                    answer = relay.handle(header, bodies)
                except RelayRefused as refusal:
                    answer = {"refused": str(refusal)}
                send_message(sock, answer)
        except OSError:
            return  # this trainer is gone; the next one begins with everything


if __name__ == "__main__":
    if "--end-with-parent" in sys.argv:
        kill_with_parent()  # the relay of a trainer that was killed must not hold the model's memory for ever
    torch.set_num_threads(1)
    serve(Relay(), (sys.argv[1], int(sys.argv[2])), os.environ[KEY_VARIABLE], Path(sys.argv[3]))
