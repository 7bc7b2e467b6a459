"""The HTTP server of a replica's sessions, in the environments' event loop.

    POST /v1/chat/completions  /v1/completions  /v1/responses  /v1/messages  /v1/messages/count_tokens
    GET /v1/models

A session's key is its API key (`Authorization: Bearer` or `x-api-key`), or part of the path: `/s/KEY/v1/...`. A turn is
read once it is finished, and a stream is made of what was read, so that both forms have the same content.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from megarl.gateway.connections import Connections
from megarl.gateway.refusals import Refusal
from megarl.gateway.session import ChatReply, ChatRequest, ChatSession
from megarl.gateway.wire import anthropic, openai, responses
from megarl.gateway.wire.fields import flag, overridden
from megarl.system.errors import ConfigError, describe
from megarl.system.plain import nested_deeper

if TYPE_CHECKING:
    from megarl.config.policies import AgentPolicyConfig

#: The name by which programs call the policy.
POLICY = "policy"
LOOPBACK = "127.0.0.1"
_MOST_BYTES = 16 << 20  # maximum bytes of a request
_DEPTH = 100
_GRACE_S = 60.0  # longest delay of a stream's first byte; until then an error is still an HTTP error status
_ALIVE_EVERY_S = 3.0  # seconds between signs of life of a stream
_ENDED_KEPT = 10_000
#: (request's body, replies, name of the response) -> the response's body, and its events if it is streamed
Write = Callable[[dict[str, Any], Sequence[ChatReply], str], tuple[dict[str, Any], Iterator[str]]]


_ONE: Callable[[dict[str, Any]], int] = lambda body: 1  # noqa: E731


@dataclass(frozen=True)
class Api:
    """How one endpoint reads requests and writes responses."""

    read: Callable[[dict[str, Any]], ChatRequest]
    write: Write
    overridden: Sequence[str]
    samples: Callable[[dict[str, Any]], int] = openai.samples_of


class Gateway:
    """Serves sessions.

    Args:
        names: names that requests may give the model, in addition to `policy`; `*`: any.
        host: address to listen at.
        path: path of a Unix socket on which to listen as well, for programs in a sandbox.
        policies: the run's policies by name, which requests name in place of `policy`; empty: it has one.
        most_sessions: maximum number of sessions at the same time.

    Attributes:
        url: address at which the gateway listens.

    Raises:
        ConfigError: `host` is no address of this machine.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        host: str = LOOPBACK,
        path: Path | None = None,
        policies: Mapping[str, AgentPolicyConfig] | None = None,
        most_sessions: int = 32,
    ) -> None:
        self._policies, self._path = policies or {}, path
        self._names = (*(self._policies or [POLICY]), *names)
        self._sessions: dict[str, ChatSession] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED_KEPT)
        try:
            self._socket = socket.create_server((host, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            raise ConfigError(
                "the machine that generates does not have this address",
                where="env.host",
                found=host,
                fix="name one of its addresses (ip -4 addr lists them)",
            ) from error
        self._runner: web.AppRunner | None = None
        self._connections = Connections(most_sessions)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        """Begin to serve; later calls do nothing."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_errors])
        for base in ("", "/s/{key}"):
            for path, handler in (
                ("/v1/chat/completions", self._handler(Api(openai.read_chat, openai.write_chat, openai.OVERRIDDEN))),
                ("/v1/completions", self._handler(Api(openai.read_text, openai.write_text, openai.OVERRIDDEN))),
                (
                    "/v1/responses",
                    self._handler(Api(responses.read_response, responses.write, openai.OVERRIDDEN, _ONE)),
                ),
                (
                    "/v1/messages",
                    self._handler(Api(anthropic.read_messages, anthropic.write, anthropic.OVERRIDDEN, _ONE)),
                ),
                ("/v1/messages/count_tokens", self._count),
            ):
                app.router.add_post(base + path, handler)
            app.router.add_get(base + "/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        sockets = [self._socket]
        if self._path is not None:
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sockets[-1].bind(str(self._path))
            sockets[-1].listen()
            # A sandbox may run as another user, so any user may connect; each request needs the key of a session.
            self._path.chmod(0o666)
        self._connections.listen(sockets, cast("web.Server", self._runner.server))

    def open(self, session: ChatSession) -> str:
        """Serve a session; return its key."""
        key = secrets.token_hex(16)
        self._sessions[key] = session
        return key

    def end(self, key: str) -> None:
        """Refuse all further requests of a session."""
        if self._sessions.pop(key, None) is not None:
            self._ended.append(key)
            self._connections.release(key)

    async def stop(self) -> None:
        """Stop serving."""
        await self._connections.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket.close()

    def _handler(self, api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            body = await _body(request)
            self._check_model(body)
            wanted, samples = self._to_policy(api.read(body), body), api.samples(body)
            name = f"gen-{secrets.token_hex(12)}"

            async def generate() -> list[ChatReply]:
                calls = [asyncio.ensure_future(session.call(wanted)) for _ in range(samples)]
                try:
                    return list(await asyncio.gather(*calls))
                finally:
                    for call in calls:  # if one call was refused, the others would otherwise go on
                        call.cancel()

            retries = request.headers.get("x-stainless-retry-count", "0")
            again = retries.strip("0") != "" or "Idempotency-Key" in request.headers
            digest = hashlib.blake2b(request.path.encode() + b"\0" + await request.read(), digest_size=16).hexdigest()
            key = request.headers.get("Idempotency-Key", digest)
            answer = asyncio.ensure_future(session.once(key, again, generate))
            headers = {"x-megarl-overridden": ",".join(overridden(body, api.overridden)), "request-id": name}
            try:
                if flag(body, "stream"):
                    return await _streamed(request, answer, body, name, api.write, headers)
                replies = await answer
            finally:
                answer.cancel()  # generation continues for a while, because `once` shields it
            with _delivering(replies):
                whole, _ = api.write(body, replies, name)
                response = web.json_response(whole, headers=headers)
                await response.prepare(request)
                await response.write_eof()
            return response

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                async with self._session(request).holding(_size(request)):
                    return await handle(request)
            except (Refusal, web.HTTPException, ConnectionError):
                raise
            except Exception as error:
                self._session(request).broken = f"the gateway failed: {describe(error)}"
                raise

        return guarded

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        async with session.holding(_size(request)):
            body = await _body(request)
            tokens = await session.count(self._to_policy(anthropic.read_messages(body), body))
        return web.json_response({"input_tokens": tokens})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        names = [name for name in self._names if name != "*"]
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "megarl"} for name in names]
        return web.json_response({"object": "list", "data": models, "has_more": False})

    def _session(self, request: web.Request) -> ChatSession:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        keys = (request.match_info.get("key"), bearer, request.headers.get("x-api-key"))
        for key in filter(None, keys):
            if key in self._sessions:
                self._connections.claim(request.protocol, key)
                return self._sessions[key]
            if key in self._ended:
                raise Refusal(410, "the episode is over", "episode_over")
        raise Refusal(
            401,
            "no running episode has this API key; send the one in OPENAI_API_KEY",
            "invalid_api_key",
            "authentication_error",
        )

    def _to_policy(self, request: ChatRequest, body: dict[str, Any]) -> ChatRequest:
        """Return a request with the limits of the policy that it names."""
        name = body.get("model")
        if not isinstance(name, str) or name not in self._policies:
            return request
        limits = self._policies[name].sampling
        rooms = [room for room in (request.room, limits.max_new_tokens) if room is not None]
        return replace(request, policy=name, room=min(rooms, default=None), stop=(*request.stop, *limits.stop))

    def _check_model(self, body: dict[str, Any]) -> None:
        model = body.get("model")
        if "*" not in self._names and model not in self._names:
            names, section = ", ".join(self._names), "policies" if self._policies else "env.models"
            raise Refusal(
                404,
                f"model: found {model!r:.100}; allowed: {names} ({section} of the recipe can add names)",
                "model_not_found",
            )


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn errors into responses in the form of the request's API."""
    try:
        return await handler(request)
    except Refusal as error:
        refusal = error
    except web.HTTPException as error:
        refusal = Refusal(error.status, error.reason or "refused", "http_error")
    except ConnectionError:
        raise
    except Exception as error:
        refusal = Refusal(500, f"the gateway failed: {describe(error)}", "internal_error", "api_error")
    messages = "/v1/messages" in request.path
    body = anthropic.error_body(refusal) if messages else openai.error_body(refusal)
    headers = {"x-should-retry": "true" if refusal.status == 429 else "false"}
    return web.json_response(body, status=refusal.status, headers=headers)


def _size(request: web.Request) -> int:
    """Return the maximum bytes of a request's body."""
    length = None if "Content-Encoding" in request.headers else request.content_length  # None: unknown
    return _MOST_BYTES if length is None else min(length, _MOST_BYTES)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        data = await request.read()
        body = json.loads(data)
        if b"\\u" in data:  # half of a surrogate pair is JSON, but no tokenizer can encode it
            body = json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict) or nested_deeper(body, _DEPTH):
        raise Refusal(400, f"the body is not a JSON object, or is nested more than {_DEPTH} levels deep")
    return body


async def _streamed(
    request: web.Request,
    answer: asyncio.Future[list[ChatReply]],
    body: dict[str, Any],
    name: str,
    write: Write,
    headers: dict[str, str],
) -> web.StreamResponse:
    response = web.StreamResponse(headers={**headers, "Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"
    await asyncio.wait({answer}, timeout=_GRACE_S)
    if not answer.done():
        await response.prepare(request)
    while not answer.done():
        await response.write(b": alive\n\n")
        await asyncio.wait({answer}, timeout=_ALIVE_EVERY_S)
    try:
        replies = answer.result()
        events = list(write(body, replies, name)[1])
    except Refusal as refusal:
        if not response.prepared:
            raise
        messages = "/v1/messages" in request.path
        error = anthropic.error_body(refusal) if messages else openai.error_body(refusal)
        text = f"event: error\ndata: {json.dumps(error)}\n\n" if messages else f"data: {json.dumps(error)}\n\n"
        await response.write(text.encode())
        return response
    with _delivering(replies):
        if not response.prepared:
            await response.prepare(request)
        for piece in _together(events):
            await response.write(piece)
        await response.write_eof()
    return response


def _together(events: Sequence[str]) -> Iterator[bytes]:
    """Yield the events in packets of some kilobytes."""
    waiting = b""
    for event in events:
        waiting += event.encode()
        if len(waiting) > 4096:
            yield waiting
            waiting = b""
    if waiting:
        yield waiting


@contextlib.contextmanager
def _delivering(replies: Sequence[ChatReply]) -> Iterator[None]:
    """Count the replies as delivered, unless writing them fails. The client may answer before `write` returns."""
    for reply in replies:
        reply.node.deliveries += 1
    try:
        yield
    except BaseException:
        for reply in replies:
            reply.node.deliveries -= 1
        raise
