"""Generation over HTTP: many samples in flight, retried on another server when theirs fails.

samples --Router--> POST /generate --> answer --> finished?  else again, with what is there
                          |
                          '-- refused, too late, or no sign of life: the server is dropped, the sample looks on
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.errors import ServerError
from megarl.rollout.sglang.api import ServerApi, tls_context
from megarl.rollout.sglang.router import NoServerError, Router
from megarl.rollout.sglang.samples import BadAnswerError, ServedSample

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_HEALTH_EVERY_S = 5.0
_PREFILL_ALONE = 256  # prompt tokens from which the first sample's prefill is worth waiting for
_INTERRUPTIONS = 100  # per sample; more means that a server answers without getting anywhere
_REFUSED = range(400, 500)  # a mistake in the request: no other server would take it


class GenerationClient:
    """Sends samples to servers. One event loop per call of `run`, which blocks until nothing more can be done.

    Args:
        config: concurrency and deadlines.
    """

    def __init__(self, config: SGLangConfig) -> None:
        self._config = config

    def run(
        self,
        samples: Sequence[ServedSample],
        servers: dict[int, ServerApi],
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        advance: Callable[[int], None],
        tag: str,
    ) -> dict[int, str]:
        """Finish the unfinished `samples` on `servers`; some stay unfinished only when every server has failed.

        A server whose weights are not called `tag` has failed.

        Returns:
            Servers that failed, by number, with the reason.

        Raises:
            ServerError: a server refused a request as wrong.
        """
        return asyncio.run(_Call(self._config, servers, sampling, stop_ids, advance, tag).run(samples))


class _Call:
    """The state of one call."""

    def __init__(
        self,
        config: SGLangConfig,
        servers: dict[int, ServerApi],
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        advance: Callable[[int], None],
        tag: str,
    ) -> None:
        self._config, self._servers, self._tag = config, servers, tag
        self._sampling, self._stop_ids, self._advance = sampling, list(stop_ids), advance
        self._router: Router[int] = Router(servers, config.max_concurrency)
        self._failed: dict[int, str] = {}
        self._open: dict[int, int] = {}  # prompt -> unfinished samples
        self._in_flight: dict[int, set[asyncio.Task[dict[str, Any]]]] = {number: set() for number in servers}
        self._freed: asyncio.Condition

    async def run(self, samples: Sequence[ServedSample]) -> dict[int, str]:
        """See GenerationClient.run."""
        import aiohttp

        waiting = [sample for sample in samples if sample.finish_reason is None]
        for sample in waiting:
            self._open[sample.prompt] = self._open.get(sample.prompt, 0) + 1
        self._freed = asyncio.Condition()
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, ssl=tls_context())
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            watches = [asyncio.create_task(self._watch(session, number)) for number in self._servers]
            try:
                await _all([self._prompt(session, group) for group in _by_prompt(waiting)])
            finally:
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, return_exceptions=True)
        return self._failed

    async def _prompt(self, session: ClientSession, samples: list[ServedSample]) -> None:
        """All samples of one prompt; a long prompt is prefilled once, before its samples come."""
        if len(samples) > 1 and len(samples[0].prompt_ids) >= _PREFILL_ALONE:
            await self._prefill(session, samples[0])
        await _all([self._finish(session, sample) for sample in samples])

    async def _prefill(self, session: ClientSession, sample: ServedSample) -> None:
        payload = {"input_ids": sample.prompt_ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
        await self._answer(session, sample, payload)

    async def _finish(self, session: ClientSession, sample: ServedSample) -> None:
        """Ask for `sample` until it is complete or no server is left."""
        while sample.finish_reason is None:
            answer = await self._answer(session, sample, sample.payload(self._sampling, self._stop_ids))
            if answer is None:
                return
            number, body = answer
            try:
                sample.add(body, self._sampling, self._stop_ids, self._tag)
                if sample.finish_reason is None and sample.interruptions > _INTERRUPTIONS:
                    sample.interruptions = 0  # the next server starts with a clean slate
                    raise BadAnswerError(f"a sample was interrupted more than {_INTERRUPTIONS} times")
            except BadAnswerError as error:
                self._fail(number, f"/generate: {error}")
        self._open[sample.prompt] -= 1
        if not self._open[sample.prompt]:
            self._router.forget(sample.prompt)
        self._advance(1)

    async def _answer(
        self, session: ClientSession, sample: ServedSample, payload: dict[str, Any]
    ) -> tuple[int, dict[str, Any]] | None:
        """Answer of the server it was routed to, and that server's number; None when no server is left."""
        while True:
            number = await self._slot(sample.prompt)
            if number is None:
                return None
            task = asyncio.create_task(self._post(session, self._servers[number], payload))
            self._in_flight[number].add(task)
            try:
                return number, await task
            except _LostError as error:
                self._fail(number, str(error))
            except asyncio.CancelledError:
                this = asyncio.current_task()
                if this is None or this.cancelling():  # the whole call is cancelled, not this server dropped
                    raise
            finally:
                task.cancel()
                self._in_flight[number].discard(task)
                self._router.give_back(number)
                async with self._freed:
                    self._freed.notify_all()

    async def _slot(self, prompt: int) -> int | None:
        async with self._freed:
            while True:
                try:
                    number = self._router.take(prompt)
                except NoServerError:
                    return None
                if number is not None:
                    return number
                await self._freed.wait()

    async def _post(self, session: ClientSession, server: ServerApi, payload: dict[str, Any]) -> dict[str, Any]:
        import aiohttp

        try:
            url = f"{server.url}/generate"
            async with session.post(url, json=payload, headers=server.headers, allow_redirects=False) as response:
                await _check(response, server)
                body: dict[str, Any] = await response.json()
                return body
        except TimeoutError:
            raise _LostError(f"no answer to /generate within {self._config.request_timeout_s:g} s") from None
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise _LostError(f"/generate: {type(error).__name__}: {error}") from error

    async def _watch(self, session: ClientSession, number: int) -> None:
        """Drop a server that gives no sign of life; one that crashed shows by itself."""
        import aiohttp

        server, limit = self._servers[number], self._config.health_timeout_s
        seen = time.monotonic()
        while number not in self._failed:
            await asyncio.sleep(min(_HEALTH_EVERY_S, limit / 4))
            try:
                timeout = aiohttp.ClientTimeout(total=max(0.1, seen + limit - time.monotonic()))
                settings: Any = {"headers": server.headers, "timeout": timeout, "allow_redirects": False}
                async with session.get(f"{server.url}/health", **settings) as response:
                    if response.status == 200:
                        seen = time.monotonic()
            except (TimeoutError, aiohttp.ClientError, OSError):
                pass
            if time.monotonic() - seen >= limit:
                self._fail(number, f"no sign of life for {limit:g} s")

    def _fail(self, number: int, why: str) -> None:
        """Route nothing more to a server, and let its samples look for another one."""
        self._failed.setdefault(number, why)
        self._router.drop(number)
        for task in self._in_flight[number]:
            task.cancel()


class _LostError(Exception):
    """A server did not answer a request."""


async def _check(response: ClientResponse, server: ServerApi) -> None:
    """Raise what an HTTP status of 300 or more means; a redirect would take the key elsewhere."""
    if response.status < 300:
        return
    text = (await response.text())[:500]
    if response.status in _REFUSED:
        raise ServerError(
            server.name, server.url, "generation (/generate)", f"HTTP {response.status}: {text}", status=response.status
        )
    raise _LostError(f"/generate: HTTP {response.status}: {text}")


def _by_prompt(samples: Sequence[ServedSample]) -> list[list[ServedSample]]:
    groups: dict[int, list[ServedSample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    return list(groups.values())


async def _all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run `jobs` side by side; the first error cancels the others and is raised as it is."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
