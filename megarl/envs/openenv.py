"""Environments that a server of the package openenv holds: the policy writes actions, the server replies.

ws://HOST/ws   {"type": "reset", "data": {"seed": 3}}     -> {"type": "observation", "data": {reward, done, ...}}
               {"type": "step", "data": {"message": ...}} -> the same, or {"type": "error", "data": {message, code}}

Every episode has a connection of its own. The package is the server's; nothing of it is needed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, ClassVar

import aiohttp
from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from megarl.envs.answers import AnswerSettings, action_text, how_to_answer, invalid_step, shown
from megarl.envs.protocol import Action, Environment, EpisodeFailure, Observation, Services, Step
from megarl.system.errors import describe

_CLOSE_S = 20.0  # seconds to end all connections
_BYTES = 64 << 20  # maximum size of a message
_FULL, _INVALID = "CAPACITY_REACHED", "VALIDATION_ERROR"
_FULL_FOR = 10  # how long an episode waits for room on a full server, as a multiple of the deadline of a reply
_AGAIN_S = 0.2  # seconds until the next attempt to begin an episode on a full server


class OpenEnvSettings(AnswerSettings):
    """The keys of the section `env` that only the environment `openenv` has."""

    url: str = Field(description="address of the server: http://host:8000")
    field: str | None = Field(
        None,
        description="field of the action that gets the text, such as `message` or `code`; null: the policy writes the "
        "whole action as JSON",
    )
    observation: str | None = Field(
        None, description="field of the observation that the policy reads; null: all fields as JSON, without `metadata`"
    )
    reset: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the environment's reset, in addition to the seed"
    )
    max_running: PositiveInt = Field(
        1, description="maximum episodes at the same time per replica; the server's `max_concurrent_envs` limits all"
    )
    timeout_s: PositiveFloat = Field(60.0, description="deadline of a reply of the server")

    @property
    def longest_s(self) -> float:
        """The deadline of a reply."""
        return self.timeout_s

    @field_validator("url")
    @classmethod
    def _has_scheme(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("a url must begin with http:// or https://")
        return url.rstrip("/")


class OpenEnvReplica:
    """The resources that all episodes of a replica share."""

    def __init__(self, settings: OpenEnvSettings, chat: bool) -> None:
        self.chat = chat
        self.free = asyncio.Semaphore(settings.max_running)
        self.form = ""  # description of actions for the policy; empty: not requested yet
        self.connected: set[OpenEnv] = set()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def disconnect(self) -> None:
        """End the connections of episodes that are unfinished."""
        await asyncio.gather(*(environment.disconnect() for environment in list(self.connected)))


class OpenEnv(Environment):
    """Plays an episode of an environment that a server holds."""

    Settings = OpenEnvSettings
    times_itself: ClassVar[bool] = True

    def __init__(self, settings: OpenEnvSettings, shared: OpenEnvReplica) -> None:
        super().__init__(settings, shared)
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._closing: asyncio.Future[None] | None = None
        self._holds = self._ended = False

    @classmethod
    def open_with(cls, settings: OpenEnvSettings, services: Services | None) -> OpenEnvReplica:
        """Return the resources that all episodes of a replica share."""
        return OpenEnvReplica(settings, services is not None and services.template is not None)

    @classmethod
    def close(cls, shared: OpenEnvReplica) -> None:
        """End all connections."""
        if shared.loop is not None:
            asyncio.run_coroutine_threadsafe(shared.disconnect(), shared.loop).result(_CLOSE_S)

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Connect and reset, with the row's columns `seed` and `reset` if it has them."""
        self.is_waiting = True
        await self.shared.free.acquire()
        self.is_waiting, self._holds = False, True
        self.shared.loop = asyncio.get_running_loop()
        self.shared.connected.add(self)
        if self._ended:
            await self.disconnect()
            raise EpisodeFailure("the run has ended the episode")
        arguments = {"seed": row.get("seed", seed % 2**31), **self.settings.reset, **(row.get("reset") or {})}
        try:
            reply = await self._begin(arguments)
            instructions = how_to_answer(self.settings, await self._form())
        except BaseException as error:
            await self.disconnect()
            raise self._failure(error) from error
        text = self._view(reply["data"])
        return shown(text + (f"\n\n{instructions}" if instructions else ""), self.shared.chat)

    async def step(self, action: Action) -> Step:
        """Send the action. A turn without a valid action changes nothing."""
        text = action_text(action.text, self.settings.tag)
        try:
            data = None if text is None else {self.settings.field: text} if self.settings.field else json.loads(text)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            return invalid_step(self.settings, self.shared.chat)
        try:
            reply = await self._ask("step", data)
        except BaseException as error:
            await self.disconnect()
            raise self._failure(error) from error
        if reply["type"] == "error" and reply["data"].get("code") == _INVALID:
            return invalid_step(self.settings, self.shared.chat)
        if reply["type"] == "error":
            await self.disconnect()
            raise EpisodeFailure(f"the server at {self.settings.url} failed: {reply['data'].get('message')}")
        reward = float(reply["data"].get("reward") or 0.0)
        if reply["data"].get("done"):
            await self.disconnect()
            return Step(None, reward, True, {"invalid": 0.0})
        return Step(shown(self._view(reply["data"]), self.shared.chat), reward, False, {"invalid": 0.0})

    def discard(self) -> None:
        """End the connection."""
        self._ended = True
        if self._holds:
            self._closing = asyncio.ensure_future(self.disconnect())

    async def _begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Connect and return the reply to `reset`, as soon as the server has room."""
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.settings.timeout_s))
        last = asyncio.get_running_loop().time() + _FULL_FOR * self.settings.timeout_s
        while True:
            async with asyncio.timeout(self.settings.timeout_s):
                self._socket = await self._client.ws_connect(f"{self.settings.url}/ws", max_msg_size=_BYTES)
            reply = await self._ask("reset", arguments)
            if reply["type"] != "error":
                self.is_waiting = False
                return reply
            if reply["data"].get("code") != _FULL:
                raise EpisodeFailure(f"the server at {self.settings.url} cannot reset: {reply['data'].get('message')}")
            if self._ended:
                raise EpisodeFailure("the run has ended the episode")
            if asyncio.get_running_loop().time() > last:
                raise EpisodeFailure(
                    f"the server at {self.settings.url} had no room within {_FULL_FOR * self.settings.timeout_s:g} s: "
                    "its max_concurrent_envs must be at least env.max_running times the number of replicas, plus the "
                    "episodes of its other clients"
                )
            self.is_waiting = True  # the server is full until another episode ends
            await self._socket.close()
            await asyncio.sleep(_AGAIN_S)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the reply."""
        if self._socket is None:
            raise EpisodeFailure("the episode is not connected to its server yet: call `reset` first")
        async with asyncio.timeout(self.settings.timeout_s):
            with contextlib.suppress(ConnectionError):  # a server without room closes; its message can still be read
                await self._socket.send_json({"type": kind, "data": data})
            message = await self._socket.receive()
        if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
            raise EpisodeFailure(f"the server at {self.settings.url} has closed the connection")
        if message.type != aiohttp.WSMsgType.TEXT:  # bytes, or an error such as a message that is too large
            raise EpisodeFailure(f"the server at {self.settings.url} sent no readable text: {message.data!r:.200}")
        reply = json.loads(message.data)
        if not (isinstance(reply, dict) and isinstance(reply.get("data"), dict) and "type" in reply):
            raise EpisodeFailure(f"the server at {self.settings.url} sent {message.data[:200]!r}, which is no reply")
        return reply

    async def _form(self) -> str:
        """Return in words what the policy has to write: a text, or a JSON object of the server's schema of actions."""
        if self.settings.field is not None:
            return "a text"
        if self.settings.instructions is None and not self.shared.form:
            if self._client is None:
                raise EpisodeFailure("the episode is not connected to its server yet: call `reset` first")
            async with self._client.get(f"{self.settings.url}/schema") as response:
                schema = (await response.json()).get("action", {})
            self.shared.form = f"a JSON object of this schema: {json.dumps(schema)}"
        return str(self.shared.form)

    def _view(self, data: dict[str, Any]) -> str:
        """Return the observation in a reply as text for the policy."""
        fields = data.get("observation")
        if self.settings.observation is None:
            whole = {name: value for name, value in fields.items() if name != "metadata"} if fields else fields
            return json.dumps(whole)
        if not isinstance(fields, dict) or self.settings.observation not in fields:
            names = ", ".join(fields) if isinstance(fields, dict) else ""
            raise EpisodeFailure(
                f"the observation has no field {self.settings.observation!r} (env.observation); it has "
                f"{names or 'no fields'}"
            )
        value = fields[self.settings.observation]
        return value if isinstance(value, str) else json.dumps(value)

    def _failure(self, error: BaseException) -> BaseException:
        """Return the error to raise for `error`: an EpisodeFailure if the server is slow or cannot be reached."""
        where = f"the server at {self.settings.url}"
        if isinstance(error, TimeoutError):
            return EpisodeFailure(f"{where} did not reply within env.timeout_s={self.settings.timeout_s:g} s")
        if isinstance(error, aiohttp.ClientError | OSError | ValueError):
            return EpisodeFailure(f"{where} cannot be reached, or is no OpenEnv server: {describe(error)}")
        return error

    async def disconnect(self) -> None:
        """End the connection, and let another episode begin."""
        if not self._holds:
            return
        self._holds = False
        try:
            if self._socket is not None and not self._socket.closed:
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
            if self._client is not None:
                await self._client.close()
        except (aiohttp.ClientError, OSError):
            pass  # the connection has ended
        finally:
            self.shared.connected.discard(self)
            self.shared.free.release()
