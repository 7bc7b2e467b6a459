"""Tools of MCP servers, through the official package `mcp`: programs started here, or servers reached over HTTP.

McpServers          the connections of one replica; calls come from any thread
`- _Connection      one server: a task keeps it open, since the package wants it closed by the task that opened it
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, model_validator

from megarl.config.base import Section
from megarl.envs.tools.schema import as_schema
from megarl.rewards.process_output import ProcessOutput
from megarl.system.errors import ConfigError
from megarl.system.imports import installed_version

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

_KEY = "env.mcp"
#: Seconds in addition to the deadlines of a call: the event loop has to pass the result on.
_GRACE_S = 5.0
#: Seconds within which a server must list its tools again after an error; otherwise its connection is closed.
_CHECK_S = 5.0
#: Seconds that a server has to end when its connection closes; after that it is killed.
_END_S = 10.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
T = TypeVar("T")


class McpServer(Section):
    """One MCP server: a program that communicates over stdin and stdout, or the address of a running server."""

    command: str | None = Field(None, description="program to start, once per replica")
    args: list[str] = Field(default_factory=list, description="arguments of the command")
    cwd: str | None = Field(None, description="folder in which the command starts; null: the run's")
    pass_env: list[str] = Field(
        default_factory=list,
        description="environment variables that are passed to the command; of all others it gets PATH, HOME, USER, "
        "LOGNAME, SHELL and TERM",
    )
    url: str | None = Field(None, description="address of a running server (streamable HTTP)")
    token_env: str | None = Field(None, description="environment variable with the bearer token for `url`")
    tools: list[str] | None = Field(None, description="tools that the model may call; null: all tools of the server")
    start_s: PositiveFloat = Field(30.0, description="deadline for the server to list its tools")

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("a server has either a command or a url: set exactly one of them")
        if self.url is None and self.token_env:
            raise ValueError("token_env is only for a url; use pass_env to pass variables to a command")
        if self.url is not None and (self.args or self.cwd or self.pass_env):
            raise ValueError(
                "args, cwd and pass_env are only for a command: remove them, or set command instead of url"
            )
        parts = urlsplit(self.url or "")
        if self.url is not None and parts.scheme not in ("http", "https"):
            raise ValueError("a url must begin with http:// or https://")
        if parts.password:
            raise ValueError("a url must not contain credentials: name a variable with token_env")
        if self.token_env and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise ValueError("the token of token_env is sent only over https://, or to this machine: correct the url")
        return self


class McpServers:
    """Connections to servers, with the schemas of their tools.

    Args:
        servers: the servers, by the names that messages use.
        timeout_s: a call that takes longer gets an error.

    Attributes:
        schemas: schemas of all tools, in the form of chat templates.

    Raises:
        ConfigError: the package mcp is missing, a server does not start or reply or lacks a requested tool, or two
            servers have tools of the same name.
    """

    def __init__(self, servers: Mapping[str, McpServer], timeout_s: float) -> None:
        _check_package()
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self._connections = [_Connection(name, server) for name, server in servers.items()]
        self._holder: dict[str, _Connection] = {}
        self.schemas: list[dict[str, Any]] = []
        try:
            for connection in self._connections:
                self._wait(connection.open(), connection.server.start_s + _END_S + _GRACE_S)
                self._take(connection)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return list(self._holder)

    def call(
        self, name: str, arguments: dict[str, Any], deadline: float = math.inf, images: Sequence[str] = ()
    ) -> tuple[str, bool]:
        """Return the tool's result, or its error as text for the model, and whether it failed.

        A server whose connection has ended is first started or connected again. `images` are not sent to servers.

        Raises:
            ConfigError: the server is gone; `env.on_error` decides what follows, since this is not the tool's result.
        """
        connection = self._holder[name]
        # `timeout_s` limits the call itself; a server that has to be started again before it has `start_s` for that.
        limit = self._timeout_s + connection.server.start_s + _END_S + _CHECK_S + _GRACE_S
        limit = max(0.0, min(limit, deadline - time.monotonic()))
        try:
            return self._wait(connection.call(name, arguments, self._timeout_s), limit)
        except TimeoutError:
            return f"error: no result within {self._timeout_s:g} s", True

    def close(self) -> None:
        """Close the connections, which ends the programs that were started."""
        with ExitStack() as stack:  # close all of them, even if one raises
            stack.callback(self._end_loop)
            for connection in self._connections:
                stack.callback(self._wait, connection.close(), _END_S + _GRACE_S)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _take(self, connection: _Connection) -> None:
        wanted = connection.server.tools
        if wanted is not None and (missing := sorted(set(wanted) - set(connection.schemas))):
            raise ConfigError(
                f"the MCP server {connection.name!r} lacks {'this tool' if len(missing) == 1 else 'these tools'}",
                where=f"{_KEY}.{connection.name}.tools",
                found=missing,
                allowed=sorted(connection.schemas),
            )
        for name in connection.schemas if wanted is None else wanted:
            key, other = f"{_KEY}.{connection.name}.tools", self._holder.get(name)
            if other is connection:
                raise ConfigError(f"the tool {name!r} is listed twice", where=key, fix="remove one of them")
            if other is not None:
                raise ConfigError(
                    f"the MCP servers {other.name!r} and {connection.name!r} both have a tool {name!r}",
                    where=_KEY,
                    fix=f"choose with {key}",
                )
            self._holder[name] = connection
            self.schemas.append(connection.schemas[name])

    def _wait(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Return the result of `work` in the loop's thread; after `limit_s` seconds cancel it and raise
        TimeoutError.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_s)
        except TimeoutError:
            future.cancel()
            raise


class _Connection:
    """The connection to one server. `schemas` holds the schemas of all its tools, by name."""

    def __init__(self, name: str, server: McpServer) -> None:
        self.name, self.server = name, server
        self.schemas: dict[str, dict[str, Any]] = {}
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._over = asyncio.Event()
        self._ready: asyncio.Future[Client]  # result of the attempt to connect, which runs in `_task`
        self._task: asyncio.Task[None] | None = None
        self._failed: tuple[float, ConfigError] | None = None  # time and reason of the last failed attempt to connect

    async def open(self) -> None:
        """Connect to the MCP server and request its tools. Raise ConfigError, which names the server and the error."""
        await self.close()
        self._failed, self._over = None, asyncio.Event()
        self._ready = ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(ready, self._over))
        try:
            async with asyncio.timeout(self.server.start_s):
                client = await asyncio.shield(ready)
                self.schemas = await _tools_of(client)
        except Exception as error:  # any exception of a server, the network or the package
            await self.close()
            refusal = ConfigError(
                f"the MCP server {self.name!r} does not list its tools: {_reason(error, self.server.start_s)}",
                where=f"{_KEY}.{self.name}",
                found=self.server.url or " ".join([self.server.command or "", *self.server.args]),
                fix="check url and token_env, and that the server is running"
                if self.server.url
                else "check command, args, cwd and pass_env, or run the command by hand to see why",
            )
            self._failed = time.monotonic(), refusal
            raise refusal from error
        self._client = client

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> tuple[str, bool]:
        """Return the tool's result, and whether it is an error.

        Raises:
            TimeoutError: no result within `timeout_s`.
            ConfigError: the connection was lost, and reconnecting failed.
        """
        async with self._opening:
            if self._client is None:
                if self._failed is not None and time.monotonic() - self._failed[0] < self.server.start_s:
                    raise self._failed[1]  # waiting calls share one failed attempt of `start_s` seconds
                await self.open()
            client = self._client
        assert client is not None, "open() either connects or raises"
        try:
            async with asyncio.timeout(timeout_s):
                return _text_of(await client.call_tool(name, arguments))
        except TimeoutError:
            await self._check(client)
            raise
        except Exception as error:  # an error of server, connection or package becomes the tool's result
            await self._check(client)
            return f"error: {error}", True

    async def close(self) -> None:
        """Close the connection. A started program is asked to end, and killed if it does not."""
        self._client = None
        self._over.set()
        if self._task is not None:
            # still connecting: the task reacts to `_over` only once the server has replied
            if not self._ready.done():
                self._task.cancel()
            await asyncio.wait({self._task}, timeout=_END_S)
            self._task.cancel()
            self._task = None

    async def _check(self, client: Client) -> None:
        """After an error, give up a connection that no longer works; the next call closes it and opens a new one."""
        try:
            async with asyncio.timeout(_CHECK_S):
                await _tools_of(client)
        except Exception:
            if client is self._client:
                self._client = None

    async def _keep(self, ready: asyncio.Future[Client], over: asyncio.Event) -> None:
        """Open the connection, hold it until `over`, and close it, all in one task, as the package mcp requires."""
        try:
            async with AsyncExitStack() as stack:
                client = await _connect(self.name, self.server, stack)
                ready.set_result(await stack.enter_async_context(client))
                await over.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)


async def _connect(name: str, server: McpServer, stack: AsyncExitStack) -> Client:
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if server.url is None:
        given = {name: _variable(name) for name in server.pass_env}
        program = StdioServerParameters(command=str(server.command), args=server.args, env=given, cwd=server.cwd)
        # Entered before the client, so that it is closed after the program has ended.
        errors = stack.enter_context(bounded_errors(f"the MCP server {name!r}"))
        return Client(stdio_client(program, errors), cache=None)
    headers = {"Authorization": f"Bearer {_variable(server.token_env)}"} if server.token_env else None
    http = await stack.enter_async_context(create_mcp_http_client(headers))
    return Client(streamable_http_client(server.url, http_client=http), cache=None)


@contextlib.contextmanager
def bounded_errors(name: str) -> Iterator[TextIO]:
    """Yield a file for a program's error output, which is printed up to a limit and then dropped."""
    reading, writing = os.pipe()
    # the thread of ProcessOutput ends when the last writer has closed the pipe
    ProcessOutput(os.fdopen(reading, "rb", buffering=0), name)
    with os.fdopen(writing, "w") as errors:
        yield errors


async def _tools_of(client: Client) -> dict[str, dict[str, Any]]:
    """Return the schemas of all tools of a server, by name; the server may list them in several pages."""
    schemas: dict[str, dict[str, Any]] = {}
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            schemas[tool.name] = as_schema(tool.name, tool.description or tool.name, tool.input_schema)
        cursor = page.next_cursor
        if cursor is None:
            return schemas


def _text_of(result: CallToolResult) -> tuple[str, bool]:
    """Return a tool's result as text for the model, and whether it is an error.

    The text consists of the result's text parts, or else is its JSON; of other parts it has only the type.
    """
    parts = [str(getattr(part, "text", f"[{part.type}]")) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    return (f"error: {text}" if result.is_error else text), bool(result.is_error)


def _reason(error: BaseException, limit_s: float) -> str:
    """Return the innermost error of an exception group in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"nothing within {limit_s:g} s (start_s)"
    return f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise LookupError(f"the environment variable {name} is not set")
    return value


def check_servers(servers: Mapping[str, McpServer]) -> None:
    """Check servers as far as possible before any is started or connected. Raise ConfigError if the package mcp is
    missing, or a command is not found.
    """
    if servers:
        _check_package()
    for name, server in servers.items():
        if server.command is not None and shutil.which(server.command, path=os.environ.get("PATH")) is None:
            raise ConfigError(
                f"the command of the MCP server {name!r} does not exist, or cannot be executed",
                where=f"{_KEY}.{name}.command",
                found=server.command,
                fix="install the program, name its full path, or make its file executable",
            )


def _check_package() -> None:
    if installed_version("mcp") is None:
        raise ConfigError("the package mcp is not installed", where=_KEY, fix="pip install '.[mcp]'")
