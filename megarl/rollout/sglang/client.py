"""Requests to servers over HTTP: many samples in flight, retried on another server when theirs fails.

samples --Slots--> POST /generate --> answer --> finished?  else send again, with the partial tokens
                         |      '-- POST /abort_request: the server answers now, with the partial tokens
                         |
                         |-- no answer within the deadline: send again, three requests at most
                         '-- server failed, or does not respond: drop the server, send to another one
"""

from __future__ import annotations

import asyncio
import resource
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.adapters import adapter_fields
from megarl.rollout.sglang.api import ServerApi, tls_context
from megarl.rollout.sglang.fleet import LostServer
from megarl.rollout.sglang.router import AttentionGroups
from megarl.rollout.sglang.samples import BadAnswerError, OtherPromptError, ServedSample
from megarl.rollout.sglang.slots import Slots
from megarl.system.errors import ServerError
from megarl.system.processes import has_nvidia_device

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_HEALTH_EVERY_S = 5.0
# Servers close idle connections (SGLang after 5 s). A request on a connection that is just being closed would fail and
# its server be dropped, so the client reuses no connection that was idle for longer than this.
_IDLE_S = 1.0
_PREFILL_ALONE = 256  # prompt tokens from which the first sample's prefill is worth waiting for
# maximum number of interruptions of a sample; more mean that a server answers without making progress
_INTERRUPTIONS = 100
_LATE = 2  # maximum number of late requests per sample that are sent again; each repeats the same work
_UNBOUNDED = 1 << 30
_ABORT_AGAIN_S = 1.0  # seconds until an abort is sent again: a server ignores one that arrives before its request
# Addresses of servers that have generated a token for this process, and so have compiled their kernels. A server that
# the run restarts has another address. A server of `rollout.sglang.urls` that was restarted still counts as warm.
_WARM: set[str] = set()
_REFUSED = range(400, 500)  # HTTP status of an invalid request, which every server would reject


class Dispatch:
    """Dispatches samples to servers, inside one event loop.

    Args:
        servers: servers with the current weights, by number.
        tag: the expected tag of the servers' weights (`version_tag`).
        done: called in the event loop with every finished sample.
        failures: queue into which servers that fail are put; another thread may empty it.

    Attributes:
        groups: the attention groups of the servers' ranks.
    """

    def __init__(
        self,
        config: SGLangConfig,
        servers: dict[int, ServerApi],
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        tag: str,
        done: Callable[[ServedSample], None],
        failures: deque[LostServer],
    ) -> None:
        self._config, self._servers, self._tag, self._done = config, dict(servers), tag, done
        self._sampling, self._stop_ids = sampling, list(stop_ids)
        self._adapter = adapter_fields(config, tag)
        self._slots = Slots(servers, config.max_concurrency or _most_requests(len(servers)))
        self.groups = AttentionGroups(config.attention_dp)
        self._failures = failures
        self._failed: set[int] = set()
        self._watches: list[asyncio.Task[None]] = []
        self._in_flight: dict[int, set[asyncio.Task[dict[str, Any]]]] = {number: set() for number in servers}
        self._requests: dict[int, tuple[int, str]] = {}  # id of a sample -> server number and request id
        self._session: ClientSession

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Open the HTTP session and watch the servers' health inside the block."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, ssl=tls_context(), keepalive_timeout=_IDLE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            self._watches = [asyncio.create_task(self._watch(*server)) for server in self._servers.items()]
            try:
                yield
            finally:
                for watch in self._watches:
                    watch.cancel()
                await asyncio.gather(*self._watches, return_exceptions=True)

    def add(self, servers: Mapping[int, ServerApi]) -> None:
        """Add servers that are new, or replace a failed server at another address. Call in the event loop."""
        for number, server in servers.items():
            if number in self._servers and (number not in self._failed or self._servers[number].url == server.url):
                continue
            self._servers[number], self._in_flight[number] = server, set()
            self._failed.discard(number)
            self.groups.drop(number)
            self._slots.add(number)
            self._watches.append(asyncio.create_task(self._watch(number, server)))

    def forget(self, prompt: int) -> None:
        """Forget which server has `prompt`, because no more of its samples will be sent."""
        self._slots.forget(prompt)
        self.groups.forget(prompt)

    async def finish(self, samples: Sequence[ServedSample]) -> None:
        """Generate samples of one prompt until they are complete or no server is left.

        A long prompt is prefilled once before its samples are sent.

        Raises:
            ServerError: a server rejected a request as invalid.
        """
        if len(samples) > 1 and len(samples[0].prompt_ids) >= _PREFILL_ALONE:
            settings = {"sampling_params": {"max_new_tokens": 0, "temperature": 0}}
            await self._answer(samples[0], samples[0].prompt_fields() | settings)
        await _all([self._finish(sample) for sample in samples])

    async def abort(self, sample: ServedSample) -> None:
        """Abort a sample in flight; it keeps its partial tokens."""
        sample.aborted = True
        self._slots.wake(sample)
        while (request := self._requests.get(id(sample))) is not None:
            await self._stop(*request)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def _stop(self, number: int, request: str) -> None:
        """Abort `request` on a server. If the server does not respond, the request or `_watch` will detect it."""
        import aiohttp

        server, timeout = self._servers[number], aiohttp.ClientTimeout(total=self._config.health_timeout_s)
        settings: Any = {"headers": server.headers, "timeout": timeout, "allow_redirects": False}
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with self._session.post(f"{server.url}/abort_request", json={"rid": request}, **settings) as response:
                if 400 <= response.status < 500:  # a wrong key or another API: a retry would fail too
                    text = f"HTTP {response.status}: {(await response.text())[:500]}"
                    raise ServerError(server.name, server.url, "abort (/abort_request)", text, status=response.status)

    async def _finish(self, sample: ServedSample) -> None:
        """Send requests for `sample` until it is complete, aborted, or no server is left."""
        while sample.finish_reason is None:
            answer = await self._answer(sample, sample.payload(self._sampling, self._stop_ids))
            if answer is None:
                if not sample.aborted:
                    return
                sample.finish_reason = "abort"
                break
            server, number, body = answer
            if sample.aborted and not body.get("output_ids"):
                continue  # the request was still in the server's queue
            try:
                sample.add(body, self._sampling, self._stop_ids, self._tag, adapter=bool(self._adapter))
                if sample.finish_reason is None and sample.interruptions > _INTERRUPTIONS:
                    sample.interruptions = 0  # the next server starts a new count
                    raise BadAnswerError(f"the server interrupted a sample more than {_INTERRUPTIONS} times")
            except OtherPromptError as error:
                raise ServerError(server.name, server.url, "generation (/generate)", str(error)) from error
            except BadAnswerError as error:
                self._fail(server, number, f"/generate: {error}")
        self._done(sample)

    async def _answer(
        self, sample: ServedSample, payload: dict[str, Any]
    ) -> tuple[ServerApi, int, dict[str, Any]] | None:
        """Return (server, its number, its answer) for the request `payload`; None: aborted, or no server is left."""
        while True:
            number = await self._slots.take(sample)
            if number is None:
                return None
            request, server, in_flight = uuid.uuid4().hex, self._servers[number], self._in_flight[number]
            group = self.groups.take(number, sample.prompt)
            place = {} if group is None else {"routed_dp_rank": group}
            task = asyncio.create_task(self._post(server, payload | place | {"rid": request}))
            in_flight.add(task)
            self._requests[id(sample)] = number, request
            try:
                answer = await task
                if answer.get("output_ids"):  # a mere prefill compiles no kernels for decoding
                    _WARM.add(server.url)
                return server, number, answer
            except TimeoutError:  # a slow request does not mean a dead server; `_watch` checks that
                await self._late(sample, number, request)
            except _LostError as error:
                self._fail(server, number, str(error))
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is None or current.cancelling():  # cancelled from outside, not by `_fail`
                    raise
            finally:
                task.cancel()
                del self._requests[id(sample)]
                in_flight.discard(task)
                if self._servers[number] is server:  # the server was not replaced meanwhile
                    self._slots.give_back(number)
                    self.groups.give_back(number, group)

    async def _late(self, sample: ServedSample, number: int, request: str) -> None:
        """Abort a request that passed its deadline; raise a ServerError if this happened too often for the sample."""
        sample.late += 1
        if sample.late > _LATE:
            server, limit = self._servers[number], self._config.request_timeout_s
            text = (
                f"{_LATE + 1} requests for one sample were not answered within rollout.sglang.request_timeout_s = "
                f"{limit:g} s: raise it, set it to null, or lower rollout.sampling.max_new_tokens"
            )
            raise ServerError(server.name, server.url, "generation (/generate)", text)
        await self._stop(number, request)

    async def _post(self, server: ServerApi, payload: dict[str, Any]) -> dict[str, Any]:
        import aiohttp

        try:
            url = f"{server.url}/generate"
            settings: Any = {"headers": server.headers, "allow_redirects": False}
            async with self._session.post(url, json=payload | self._adapter, **settings) as response:
                await _check(response, server, self._adapter.get("lora_path"))
                # An answer has a list for each token. Python's own parser would keep a core busy for 4% of a step.
                body: dict[str, Any] = from_json(await response.read(), cache_strings="keys")
                return body
        except TimeoutError as error:
            # requests have no deadline here, so the connection timed out in the operating system
            if self._config.request_timeout_s is None:
                raise _LostError(f"/generate failed: {type(error).__name__}: {error}") from error
            raise
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise _LostError(f"/generate failed: {type(error).__name__}: {error}") from error

    async def _watch(self, number: int, server: ServerApi) -> None:
        """Drop a server whose scheduler stops responding; a crashed server is noticed when its requests fail.

        An idle server generates one token for `/health_generate`, and a busy server answers after its next batch, so
        long samples and queues do not delay the answer. `/health` of a colocated server does not test the scheduler.
        """
        import aiohttp

        alive = self._config.health_timeout_s
        since: float | None = None  # time of the first unanswered query; a suspension of this process does not count
        while self._servers[number] is server and number not in self._failed:
            await asyncio.sleep(min(_HEALTH_EVERY_S, alive / 4))
            # for its first sample a server with a GPU compiles kernels, which may take as long as a start
            # (the run's own servers have GPUs if this machine has; those of `urls` may have some even if it has none)
            cold = (has_nvidia_device() or bool(self._config.urls)) and server.url not in _WARM
            limit = max(alive, self._config.start_timeout_s) if cold else alive
            now = time.monotonic()
            since = now if since is None else since
            try:
                timeout = aiohttp.ClientTimeout(total=max(0.1, since + limit - now))
                settings: Any = {"headers": server.headers, "timeout": timeout, "allow_redirects": False}
                async with self._session.get(f"{server.url}/health_generate", **settings) as response:
                    if response.status == 200:
                        since = None
            except (TimeoutError, aiohttp.ClientError, OSError):
                pass
            if since is not None and time.monotonic() - since >= limit:
                key = "health_timeout_s" if limit == alive else "start_timeout_s"
                reason = f"no sign of life from its scheduler (/health_generate) for {limit:g} s"
                self._fail(server, number, f"{reason} (rollout.sglang.{key})")

    def _fail(self, server: ServerApi, number: int, why: str) -> None:
        """Drop a server and cancel its requests, so that their samples are sent to other servers."""
        if self._servers[number] is not server or number in self._failed:
            return
        self._failed.add(number)
        self._failures.append(LostServer(number, server.url, why))
        self._slots.drop(number)
        for task in self._in_flight[number]:
            task.cancel()


def _most_requests(servers: int) -> int:
    """Return the limit of samples in flight per server, so that connections use at most half the file descriptors."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNBOUNDED if most == resource.RLIM_INFINITY else max(1, most // 2 // max(1, servers))


def for_others(error: BaseException) -> dict[str, Any]:
    """Return the fields of the ServerError that other ranks raise for `error`."""
    if isinstance(error, ServerError):
        return vars(error)
    return {"server": "the client", "url": "", "phase": "generation", "reason": f"{type(error).__name__}: {error}"}


class _LostError(Exception):
    """A server failed to answer a request, so the server is dropped."""


async def _check(response: ClientResponse, server: ServerApi, adapter: str | None) -> None:
    """Raise an error for an HTTP status of 300 or more; a redirect would send the key elsewhere.

    A server that does not have the request's `adapter` was restarted after the last update, so it is lost like a server
    with other weights.
    """
    if response.status < 300:
        return
    text = (await response.text())[:500]
    without_adapter = response.status == 400 and adapter is not None and adapter in text
    if response.status in _REFUSED and not without_adapter:
        raise ServerError(
            server.name, server.url, "generation (/generate)", f"HTTP {response.status}: {text}", status=response.status
        )
    raise _LostError(f"/generate failed with HTTP {response.status}: {text}")


async def _all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run `jobs` concurrently; the first error cancels the others and is raised unchanged."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
