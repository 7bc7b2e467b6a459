"""Messages between the trainer and processes that serve it: a JSON header and raw bytes, never pickles.

Both sides first prove that they have the run's key. A message is read completely before it is acted on. If an answer
does not come in time, the connection is closed, so that a late answer is not taken for that to the next message.
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
_AGAIN_S = 0.1  # seconds until the next attempt to accept a connection, after one that failed
_LIMIT = 64 << 30  # maximum bytes of a message; a message that claims to be larger is not from megarl

Handler = Callable[[dict[str, Any], list[bytearray]], dict[str, Any]]
Opened = Callable[[], contextlib.AbstractContextManager[Handler]]


class Refused(Exception):
    """The process at the other end of a connection rejected a request."""


class FailedError(ConnectionError):
    """An error occurred while the other side handled a request; it sent the reason and closed the connection."""


def send_message(sock: socket.socket, header: dict[str, Any], *bodies: memoryview, end: float | None = None) -> None:
    """Send a JSON header followed by bytes, before `end` (monotonic time) if it is given."""
    text = json.dumps(header | {"bytes": [len(body) for body in bodies]}).encode()
    parts: list[bytes | memoryview] = [len(text).to_bytes(4, "little") + text, *bodies]
    for part in parts:
        _wait_until(sock, end)
        sock.sendall(part)


def read_message(sock: socket.socket, end: float | None = None) -> tuple[dict[str, Any], list[bytearray]]:
    """Read a message that `send_message` sent.

    Raises:
        ConnectionError: the other side is gone.
        TimeoutError: the message was not complete before `end`.
    """
    header = json.loads(_read(sock, int.from_bytes(_read(sock, 4, end), "little"), end))
    return header, [_read(sock, size, end) for size in header.pop("bytes")]


def _wait_until(sock: socket.socket, end: float | None) -> None:
    """Set the socket's timeout, which applies to one call, to the time that is left for the whole message."""
    left = None if end is None else end - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError("the message was not transferred completely before the deadline")
    sock.settimeout(left)


def _read(sock: socket.socket, size: int, end: float | None = None) -> bytearray:
    if not 0 <= size <= _LIMIT:
        raise ConnectionError(
            f"a message announces {size} bytes; allowed: 0 to {_LIMIT}. The sender is not a process of this run"
        )
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
    """The client of a message server. It makes one call at a time; the default deadline of a call is `deadline_s`.

    Args:
        peer: name of the other side, which is part of its proof of the key and of error messages.

    Raises:
        ConnectionError: the process that answers does not have the key.
        OSError: no process answers.
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
                raise ConnectionError(
                    f"the process at {address[0]}:{address[1]} is not this run's {peer}, since it does not have the "
                    "run's key; another program may have taken the port: start the run again"
                )
        except OSError:
            self._sock.close()
            raise

    def call(self, header: dict[str, Any], *bodies: memoryview, deadline_s: float | None = None) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises:
            Refused: the other side rejected the request.
            FailedError: the other side failed.
            OSError: the other side is gone or did not answer in time; the connection can no longer be used.
        """
        with self._lock:
            end = time.monotonic() + (deadline_s or self._deadline_s)
            try:
                send_message(self._sock, header, *bodies, end=end)
                answer, _ = read_message(self._sock, end)
                if "failed" in answer:
                    raise FailedError(f"the other side failed: {answer['failed']}")
            except OSError:
                self._sock.close()  # a late answer must not be read by the next call
                raise
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def proof(key: str, who: bytes, nonce: bytes | bytearray) -> bytes:
    """Return a proof of the key; `who` makes the two sides' proofs different."""
    return hmac.digest(key.encode(), who + nonce, "sha256")


def answer(listener: socket.socket, opened: Opened, key: str, name: str) -> None:
    """Accept connections until the process ends or the listener is closed; each is served in its own thread.

    Args:
        opened: called for each connection; returns a handler, which receives a message and returns the answer or raises
            Refused.
        name: name of this process, which is part of its proof of the key.
    """
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # a client left before it was accepted, too many files are open, or the listener is closed
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
                    reply = handle(header, bodies)
                except Refused as refusal:
                    reply = {"refused": str(refusal)}
                except Exception as error:
                    traceback.print_exc()
                    send_message(sock, {"failed": f"{type(error).__name__}: {error}"})
                    return
                send_message(sock, reply)
        except OSError:
            return  # the connection broke, or the other side did not prove the key in time; it may connect again
