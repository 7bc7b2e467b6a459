"""Messages between a trainer and processes that serve it: a JSON header and raw bytes, never pickles.

Both sides prove that they know the run's key before anything is said. A message is read to its end before anything is
done, and an answer that comes too late ends the connection: nobody takes it for the next one.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

_NONCE = 32
_PROOF_S = 30.0
_AGAIN_S = 0.1  # until connections are accepted again after one that failed
_LIMIT = 64 << 30  # bytes of a message; more is not a message of ours

Handler = Callable[[dict[str, Any], list[bytearray]], dict[str, Any]]
Opened = Callable[[], contextlib.AbstractContextManager[Handler]]


class Refused(Exception):
    """The other side answered that it cannot do what was asked."""


class FailedError(ConnectionError):
    """The other side failed at what was asked, told why, and closed the connection."""


def send_message(sock: socket.socket, header: dict[str, Any], *bodies: memoryview, end: float | None = None) -> None:
    """Send a JSON header, and bytes after it, before `end` on the monotonic clock if that is given."""
    text = json.dumps(header | {"bytes": [len(body) for body in bodies]}).encode()
    parts: list[bytes | memoryview] = [len(text).to_bytes(4, "little") + text, *bodies]
    for part in parts:
        _wait_until(sock, end)
        sock.sendall(part)


def read_message(sock: socket.socket, end: float | None = None) -> tuple[dict[str, Any], list[bytearray]]:
    """Return the counterpart of `send_message`.

    Raises:
        ConnectionError: the other side is gone.
        TimeoutError: not all of it was there before `end`.
    """
    header = json.loads(_read(sock, int.from_bytes(_read(sock, 4, end), "little"), end))
    return header, [_read(sock, size, end) for size in header.pop("bytes")]


def _wait_until(sock: socket.socket, end: float | None) -> None:
    """Shrink the socket's timeout, which is per call, so that the deadline is that of a whole message."""
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


class MessageClient:
    """The trainer's end. Calls are serialised; each has the deadline `deadline_s`, unless it is given another.

    Args:
        peer: the name of the other side, for its proof and for messages.

    Raises:
        ConnectionError: who answers does not know the key.
        OSError: nobody answers.
    """

    def __init__(self, address: tuple[str, int], key: str, deadline_s: float, peer: str = "relay") -> None:
        self._sock = socket.create_connection(address, timeout=deadline_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock, self._deadline_s = threading.Lock(), deadline_s
        end = time.monotonic() + deadline_s
        try:
            nonce = secrets.token_bytes(_NONCE)
            self._sock.sendall(proof(key, b"trainer", _read(self._sock, _NONCE, end)) + nonce)
            if not hmac.compare_digest(_read(self._sock, _NONCE, end), proof(key, peer.encode(), nonce)):
                raise ConnectionError(f"who answers is not this run's {peer}")
        except OSError:
            self._sock.close()
            raise

    def call(self, header: dict[str, Any], *bodies: memoryview, deadline_s: float | None = None) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises:
            Refused: the other side could not do it.
            FailedError: it failed at it.
            OSError: it is gone, or did not answer in time; the connection is of no more use.
        """
        with self._lock:
            end = time.monotonic() + (deadline_s or self._deadline_s)
            try:
                send_message(self._sock, header, *bodies, end=end)
                answer, _ = read_message(self._sock, end)
                if "failed" in answer:
                    raise FailedError(f"it failed: {answer['failed']}")
            except OSError:
                self._sock.close()  # the answer may still come, and the next call would take it for its own
                raise
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def proof(key: str, who: bytes, nonce: bytes | bytearray) -> bytes:
    """Return an answer that needs the key; `who` keeps one side's answer from serving as the other's."""
    return hmac.digest(key.encode(), who + nonce, "sha256")


def answer(listener: socket.socket, opened: Opened, key: str, name: str) -> None:
    """Answer trainers until the process ends or the listener is closed; each connection has a thread.

    Args:
        opened: called for each connection; its handler takes a message and returns the answer, or raises Refused.
        name: name of this side, for its proof.
    """
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # a trainer that hung up at once, too many open files; or the listener is closed
            time.sleep(_AGAIN_S)
            if listener.fileno() < 0:
                return
            continue
        threading.Thread(target=_converse, args=(opened, sock, key, name), daemon=True).start()


def _converse(opened: Opened, sock: socket.socket, key: str, name: str) -> None:
    with sock, opened() as handle:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end = time.monotonic() + _PROOF_S
            nonce = secrets.token_bytes(_NONCE)
            sock.sendall(nonce)
            if not hmac.compare_digest(_read(sock, _NONCE, end), proof(key, b"trainer", nonce)):
                return
            sock.sendall(proof(key, name.encode(), _read(sock, _NONCE, end)))
            while True:
                header, bodies = read_message(sock)
                try:
                    found = handle(header, bodies)
                except Refused as refusal:
                    found = {"refused": str(refusal)}
                except Exception as error:
                    traceback.print_exc()
                    send_message(sock, {"failed": f"{type(error).__name__}: {error}"})
                    return
                send_message(sock, found)
        except OSError:
            return  # this trainer is gone; the next one begins with everything
