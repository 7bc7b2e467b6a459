"""One blocking JSON call to one server: every control message of servers and weight updates goes through here."""

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
_SHOWN = 500  # characters of a refusal that go into the message


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return the context for `https://`: certificate and host name are checked, against the system's authorities or
    SSL_CERT_FILE."""
    return ssl.create_default_context()


@dataclass(frozen=True)
class ServerApi:
    """The HTTP interface of one server.

    Attributes:
        url: `http://host:port` or `https://host:port`, and a path in front of the server's own where a proxy wants one.
        api_key: sent with every call; not shown in `repr`. None: the server has none.
        name: the server's name in messages, for example `server 0`.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    name: str = "server"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request to this server."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def call(
        self, path: str, payload: dict[str, Any] | None = None, *, deadline_s: float, phase: str, method: str = "POST"
    ) -> dict[str, Any]:
        """Send `payload` as JSON and return the JSON answer. Never repeated: most of these calls change the server.

        An empty answer, one that is not JSON and one that is no JSON object come back as `{"text": ...}`.

        Args:
            path: begins with a slash.
            payload: body; None sends none.
            deadline_s: seconds for the whole exchange.
            phase: the current activity, for the message.

        Raises:
            ServerError: not reached, no whole answer within the deadline, an HTTP status of 300 or more (a redirect
                would take the key elsewhere), or an answer that says `"success": false`.
        """
        try:
            status, text = self._exchange(path, payload, method, time.monotonic() + deadline_s)
        except TimeoutError:
            raise self._error(phase, path, f"no answer within {deadline_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise self._error(phase, path, f"{UNTRUSTED} ({error.verify_message})") from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a URL that cannot be one
            raise self._error(phase, path, f"{type(error).__name__}: {error}") from error
        answer = _decode(text)
        if status >= 300:
            raise self._error(phase, path, f"HTTP {status}: {text[:_SHOWN].strip()}", status)
        if answer.get("success") is False:
            raise self._error(phase, path, f"refused: {answer.get('message', text[:_SHOWN])}", status)
        return answer

    def _exchange(self, path: str, payload: dict[str, Any] | None, method: str, end: float) -> tuple[int, str]:
        """Return the status and body of the answer."""
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
            # A socket's timeout is per read; shrinking it before each one makes the deadline that of the whole answer.
            while not parts or parts[-1]:
                _wait_at_most(sock, end)
                parts.append(response.read1(_CHUNK))
            if response.length:  # read1 does not tell a cut answer from a whole one
                raise http.client.IncompleteRead(b"".join(parts), response.length)
            return response.status, b"".join(parts).decode("utf-8", "replace")
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
        """Return a connection that is not open yet, and the path of `url`, which every request begins with."""
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
    except (ValueError, RecursionError):  # of brackets that go too deep
        return {"text": text}
    return answer if isinstance(answer, dict) else {"text": text}
