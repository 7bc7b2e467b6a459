"""Blocking JSON calls to one server, for all control messages and weight updates."""

from __future__ import annotations

import functools
import http.client
import json
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from megarl.system.errors import ServerError

_CHUNK = 1 << 20
UNTRUSTED = "its certificate is not trusted: name the file of a private authority in SSL_CERT_FILE"
_SHOWN = 500  # characters of an error answer that are quoted in the message


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return the TLS context, which checks certificates and host names against SSL_CERT_FILE or the system's
    authorities."""
    return ssl.create_default_context()


@dataclass(frozen=True)
class ServerApi:
    """The HTTP interface of one server.

    Attributes:
        url: `http://host:port` or `https://host:port`, with a path prefix if a proxy needs it.
        api_key: sent with every call; not shown in `repr`. None: the server has none.
        name: the server's name in messages, for example `server 0`.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    name: str = "server"

    @property
    def headers(self) -> dict[str, str]:
        """Authorization header of every request to this server; empty without a key."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def call(
        self, path: str, payload: dict[str, Any] | None = None, *, deadline_s: float, phase: str, method: str = "POST"
    ) -> dict[str, Any]:
        """Send `payload` as JSON and return the JSON answer, without retries because most calls change the server.

        An answer that is not a JSON object is returned as `{"text": ...}`.

        Args:
            path: begins with a slash.
            payload: body; None sends none.
            deadline_s: seconds for request and answer together.
            phase: the current activity, for error messages.

        Raises:
            ServerError: no connection, no complete answer within the deadline, an HTTP status of 300 or more (a
                redirect would send the key elsewhere), or an answer with `"success": false`.
        """
        try:
            status, text = self._exchange(path, payload, method, time.monotonic() + deadline_s)
        except TimeoutError:
            raise self._error(phase, path, f"no answer within {deadline_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise self._error(phase, path, f"{UNTRUSTED} ({error.verify_message})") from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: an invalid URL
            raise self._error(phase, path, f"{type(error).__name__}: {error}") from error
        answer = _decode(text)
        if status >= 300:
            raise self._error(phase, path, f"HTTP {status}: {text[:_SHOWN].strip()}", status)
        if answer.get("success") is False:
            raise self._error(phase, path, f"refused: {answer.get('message', text[:_SHOWN])}", status)
        return answer

    def _exchange(self, path: str, payload: dict[str, Any] | None, method: str, end: float) -> tuple[int, str]:
        """Send the request and return the status and body of the answer."""
        body = None if payload is None else json.dumps(payload).encode()
        headers = self.headers | ({} if body is None else {"Content-Type": "application/json"})
        connection, prefix = self._connection(_left(end))
        try:
            connection.connect()
            sock = connection.sock
            connection.request(method, prefix + path, body=body, headers=headers)
            _wait_at_most(sock, end)
            response = connection.getresponse()
            parts: list[bytes] = []
            # A socket's timeout is per read; shrinking it before each read bounds the whole answer by the deadline.
            while not parts or parts[-1]:
                _wait_at_most(sock, end)
                parts.append(response.read1(_CHUNK))
            if response.length:  # read1 does not report a truncated answer
                raise http.client.IncompleteRead(b"".join(parts), response.length)
            return response.status, b"".join(parts).decode("utf-8", "replace")
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
        """Return an unopened connection and the path prefix of `url`."""
        place = urlsplit(self.url)
        host, prefix = place.hostname or "", place.path.rstrip("/")
        if place.scheme == "https":
            return http.client.HTTPSConnection(host, place.port, timeout=timeout_s, context=tls_context()), prefix
        return http.client.HTTPConnection(host, place.port, timeout=timeout_s), prefix

    def _error(self, phase: str, path: str, reason: str, status: int | None = None) -> ServerError:
        return ServerError(self.name, self.url, f"{phase} ({path})", reason, status=status)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _wait_at_most(sock: socket.socket, end: float) -> None:
    sock.settimeout(_left(end))


def _decode(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: too deeply nested brackets
        return {"text": text}
    return answer if isinstance(answer, dict) else {"text": text}
