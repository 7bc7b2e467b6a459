"""The connections of a replica's endpoint: there is a limit for all, and one for each running session.

    accept -> stranger -(request with a session's key)-> the session's -(end of the session)-> stranger

Where there is no room, the oldest stranger makes way. So no program can keep others from the endpoint, neither with
connections on which it sends nothing nor with many of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megarl.gateway.refusals import Refusal

if TYPE_CHECKING:
    from aiohttp.web import RequestHandler

_EACH = 64  # connections of a session
_REFUSED = 64  # connections that are being refused at the same time; further ones are closed at once
_REFUSED_S = 2.0  # seconds in which a client may read why its connection is refused
_AGAIN_S = 0.1  # seconds until the next attempt to accept, if the process has too many open files


class Connections:
    """Accepts connections for as many sessions as may run.

    Args:
        sessions: maximum number of sessions at the same time.

    Attributes:
        each, most: maximum connections of a session, and of all. Open files of the process limit them.
    """

    def __init__(self, sessions: int) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        allowed = _EACH if files == resource.RLIM_INFINITY else files // 2 // sessions
        self.each = max(1, min(_EACH, allowed))
        self.most = self.each * sessions
        # session key of each open connection, the oldest connection first; empty: no session
        self._open: dict[RequestHandler, str] = {}
        self._refused: set[_Refused] = set()
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    def listen(self, sockets: Sequence[socket.socket], handler: Callable[[], RequestHandler]) -> None:
        """Begin to accept connections, which get a new `handler` each."""
        for listening in sockets:
            listening.setblocking(False)
            self._sockets.append(listening)
            self._tasks.append(asyncio.ensure_future(self._accept(listening, handler)))

    async def stop(self) -> None:
        """Accept no further connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()

    def claim(self, handler: RequestHandler, key: str) -> None:
        """Count a connection as the session's.

        Raises:
            Refusal: the session has no room for it.
        """
        if self._open.get(handler) == key:
            return
        self._forget_closed()
        if sum(holder == key for holder in self._open.values()) >= self.each:
            raise Refusal(
                429,
                f"{self.each} connections of this session are open, as many as it may have: use them again, or close "
                "some",
                "rate_limit",
                "rate_limit_error",
            )
        self._open[handler] = key

    def release(self, key: str) -> None:
        """Count the connections of a session that has ended as connections without a session."""
        self._open = {handler: "" if holder == key else holder for handler, holder in self._open.items()}

    async def _accept(self, listening: socket.socket, handler: Callable[[], RequestHandler]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError:  # too many open files, or the client has gone
                await asyncio.sleep(_AGAIN_S)
                continue
            with contextlib.suppress(OSError):  # the client has gone
                if self._has_room():
                    _, accepted = await loop.connect_accepted_socket(handler, connection)
                    self._open[accepted] = ""
                elif len(self._refused) < _REFUSED:
                    await loop.connect_accepted_socket(lambda: _Refused(self.most, self._refused), connection)
                else:
                    connection.close()

    def _has_room(self) -> bool:
        """Return whether a connection may be accepted. If all are taken, the oldest one without a session is closed."""
        self._forget_closed()
        if len(self._open) < self.most:
            return True
        stranger = next((handler for handler, holder in self._open.items() if not holder), None)
        if stranger is None:
            return False
        if stranger.transport is not None:
            stranger.transport.abort()
        del self._open[stranger]
        return True

    def _forget_closed(self) -> None:
        self._open = {
            handler: holder
            for handler, holder in self._open.items()
            if handler.transport is not None and not handler.transport.is_closing()
        }


class _Refused(asyncio.Protocol):
    """Answers the first request of a connection with 503, and closes it.

    Args:
        most: maximum number of connections.
        refused: the connections that are being refused, of which this is one until it is closed.
    """

    def __init__(self, most: int, refused: set[_Refused]) -> None:
        self._most, self._all, self._has_answered = most, refused, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._all.add(self)
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(_REFUSED_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._has_answered:
            return
        self._has_answered = True
        message = f"the endpoint has {self._most} open connections, as many as it may have; send the request again"
        error = {"message": message, "type": "rate_limit_error", "code": "rate_limit"}
        body = json.dumps({"type": "error", "error": error})  # clients of OpenAI and of Anthropic both read this form
        head = (
            "HTTP/1.1 503 Service Unavailable",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Retry-After: 1",
            "x-should-retry: true",
            "Connection: close",
        )
        self._transport.write(("\r\n".join(head) + "\r\n\r\n" + body).encode())
        self._transport.write_eof()  # what the client still sends is read, because a reset would lose the answer

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._all.discard(self)
