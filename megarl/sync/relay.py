"""A process on a server's host that keeps the last weights in shared memory and brings them forward by deltas.

    MEGARL_RELAY_KEY=... python -m megarl.sync.relay HOST PORT PORT_FILE     (port 0: a free one, written to PORT_FILE)

    trainer                                relay                                   server
    changed words of bucket 3  --TCP-->    base of bucket 3 += them
    which handles for server 0?  ----->    handles of the tensors that changed
    handles                      ---------------------- HTTP ------------------->  maps them, copies

A bucket moves from version to version whole: a message is read to its end before anything changes. The base must be
the one that the delta was made from; otherwise the answer says so and the trainer sends everything. The trainer proves
that it knows the run's key before it is listened to; messages are JSON and raw bytes, never pickles.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.compat.sglang_wire import bucket_payload, shared_buffer
from megarl.processes import kill_with_parent
from megarl.sync.delta import Delta, apply_delta
from megarl.sync.plan import Entry

KEY_VARIABLE = "MEGARL_RELAY_KEY"
_NONCE = 32
_LIMIT = 64 << 30  # bytes of a message; more is not a message of ours


class RelayRefused(Exception):
    """The relay answered that it cannot do what was asked."""


def send_message(sock: socket.socket, header: dict[str, Any], *bodies: memoryview) -> None:
    """A JSON header, and bytes after it."""
    text = json.dumps(header | {"bytes": [len(body) for body in bodies]}).encode()
    sock.sendall(len(text).to_bytes(4, "little") + text)
    for body in bodies:
        sock.sendall(body)


def read_message(sock: socket.socket) -> tuple[dict[str, Any], list[bytearray]]:
    """The counterpart of `send_message`.

    Raises:
        ConnectionError: the other side is gone.
    """
    header = json.loads(_read(sock, int.from_bytes(_read(sock, 4), "little")))
    return header, [_read(sock, size) for size in header.pop("bytes")]


def _read(sock: socket.socket, size: int) -> bytearray:
    if not 0 <= size <= _LIMIT:
        raise ConnectionError(f"a message of {size} bytes")
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = sock.recv_into(view[got:])
        if count == 0:
            raise ConnectionError("the other side closed the connection")
        got += count
    return data


class RelayClient:
    """The trainer's end. Calls are serialised; each has the deadline `deadline_s`."""

    def __init__(self, address: tuple[str, int], key: str, deadline_s: float) -> None:
        self._sock = socket.create_connection(address, timeout=deadline_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        nonce = _read(self._sock, _NONCE)
        self._sock.sendall(hmac.digest(key.encode(), bytes(nonce), "sha256"))
        self.call({"op": "hello"})

    def call(self, header: dict[str, Any], *bodies: memoryview) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises:
            RelayRefused: the relay could not do it.
            OSError: the relay is gone, or did not answer in time; the connection is of no more use.
        """
        with self._lock:
            try:
                send_message(self._sock, header, *bodies)
                answer, _ = read_message(self._sock)
            except OSError:
                self._sock.close()  # the answer may still come, and the next call would take it for its own
                raise
        if "refused" in answer:
            raise RelayRefused(answer["refused"])
        return answer

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


@dataclass
class _Base:
    entries: list[Entry]
    flat: Tensor
    version: int


class Relay:
    """Buckets by name, in shared memory."""

    def __init__(self) -> None:
        self._bases: dict[str, _Base] = {}
        self._lock = threading.Lock()

    def handle(self, header: dict[str, Any], bodies: list[bytearray]) -> dict[str, Any]:
        """Answer one message."""
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "hello": self._hello,
            "full": self._full,
            "delta": self._delta,
            "handles": self._handles,
        }
        with self._lock:
            return actions[header.pop("op")](bodies=bodies, **header)

    def _hello(self, bodies: list[bytearray]) -> dict[str, Any]:
        return {}

    def _full(self, bodies: list[bytearray], bucket: str, version: int, entries: list[list[Any]]) -> dict[str, Any]:
        data = torch.frombuffer(bodies[0], dtype=torch.uint8)
        base = self._bases.get(bucket)
        if base is None or len(base.flat) != len(data):
            base = self._bases[bucket] = _Base([], shared_buffer(len(data), torch.device("cpu")), version)
        base.entries = [Entry(n, tuple(shape), dtype, *rest) for n, shape, dtype, *rest in entries]
        base.flat.copy_(data)
        base.version = version
        return {}

    def _delta(self, bodies: list[bytearray], bucket: str, base: int, version: int) -> dict[str, Any]:
        held = self._bases.get(bucket)
        if held is None or held.version != base:
            raise RelayRefused(f"base {None if held is None else held.version} instead of {base}")
        apply_delta(held.flat, Delta.from_bytes(bodies))
        held.version = version
        return {}

    def _handles(self, bodies: list[bytearray], bucket: str, version: int, ranks: list[list[int]]) -> dict[str, Any]:
        """Payloads that hand tensors of the bucket to a server: for each of its ranks the numbers of the entries."""
        held = self._bases.get(bucket)
        if held is None or held.version != version:
            raise RelayRefused(f"version {None if held is None else held.version} instead of {version}")
        return {"payloads": [bucket_payload(held.flat, [held.entries[i] for i in rank]) for rank in ranks]}


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
            sock.settimeout(30.0)  # to prove the key
            nonce = secrets.token_bytes(_NONCE)
            sock.sendall(nonce)
            if not hmac.compare_digest(bytes(_read(sock, 32)), hmac.digest(key.encode(), nonce, "sha256")):
                return
            sock.settimeout(None)
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
