"""Requests of rewards to servers: concurrency, retries, deadlines, and the reason when there is no score."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.algorithms.registry import Settings
from megarl.config.base import Seconds
from megarl.config.sglang import url_problem
from megarl.rewards.registry import KWARGS
from megarl.rewards.scoring import ScoringFailure
from megarl.system.credentials import mask
from megarl.system.errors import ConfigError

T = TypeVar("T")
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # statuses for which another attempt may succeed
_LARGEST = 64 << 20  # largest reply in bytes
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0


class EndpointSettings(Settings):
    """The server that scores, and the limits of its requests."""

    url: str = Field(description="address of the server")
    api_key_env: str | None = Field(
        None, description="environment variable of the workers that holds the bearer token; null: no token is sent"
    )
    concurrency: PositiveInt = Field(
        8, le=1024, description="simultaneous requests per data-parallel rank (and per process of reward.workers)"
    )
    request_timeout_s: Seconds = Field(60.0, description="deadline of one attempt")
    retries: NonNegativeInt = Field(
        3, le=100, description="further attempts after no reply, an unusable reply, or status 429 or 5xx"
    )
    deadline_s: Seconds = Field(
        240.0, description="deadline of a batch, at which samples without a score fail; below reward.timeout_s"
    )

    def problems(self, path: str) -> list[ConfigError]:
        """Return an error if the address of the server is invalid."""
        why = url_problem(self.url.partition("?")[0] if self.posts_to_url() else self.url, f"{path}.api_key_env")
        if why is None:
            return []
        return [
            ConfigError(
                f"invalid address of a server: {why}",
                where=f"{path}.url",
                found=mask(self.url),
                allowed="http://HOST:PORT/... or https://...",
            )
        ]

    def posts_to_url(self) -> bool:
        """Return whether requests go to `url` itself, which may then have a query; otherwise a path is appended
        to it."""
        return False

    def server(self, url: str) -> ScoreServer:
        """Return a client of the server at `url` with the settings of this endpoint."""
        return ScoreServer(url, self.api_key_env, self.request_timeout_s, self.retries)

    def require_key(self) -> None:
        """Raise a ConfigError if the environment variable of the key is not set here, or is empty."""
        if self.api_key_env is not None:
            _key(self.api_key_env)


class NoAnswer(Exception):
    """A server gave no usable reply. The text is the reason and names the server."""


@dataclass(frozen=True)
class ScoreServer:
    """A server that receives and returns JSON.

    Attributes:
        url: address to which requests are posted.
        api_key_env: environment variable with the bearer token; None: no token is sent.
        timeout_s: deadline of one attempt in seconds.
        retries: number of further attempts after a failed one.
    """

    url: str
    api_key_env: str | None
    timeout_s: float
    retries: int

    def ask(self, body: Any, read: Callable[[Any], T], deadline: float, before: Callable[[], None] = lambda: None) -> T:
        """Post `body` and return the result of `read` for the reply, which raises ValueError, KeyError, IndexError or
        TypeError for an unusable one. Raise NoAnswer if every attempt failed, `before` refused it, or the deadline
        (monotonic clock) passed."""
        data, wait, last = json.dumps(body).encode(), _FIRST_WAIT_S, "the deadline passed before the first request"
        attempts = 0
        while attempts <= self.retries and (left := deadline - time.monotonic()) > 0:
            before()
            attempts += 1
            try:
                return read(json.loads(self._post(data, min(self.timeout_s, left))))
            except urllib.error.HTTPError as error:
                last = f"status {error.code}: {_reply_text(error)}"
                if error.code not in _AGAIN:
                    break
            except (OSError, http.client.HTTPException) as error:
                last = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
            except (ValueError, KeyError, IndexError, TypeError) as error:
                last = f"an unusable reply, {type(error).__name__}: {error}"
            time.sleep(max(0.0, min(wait, deadline - time.monotonic())) if attempts <= self.retries else 0.0)
            wait = min(2 * wait, _LONGEST_WAIT_S)
        tries = f"{attempts} attempt{'s' if attempts != 1 else ''}"
        raise NoAnswer(f"the server at {mask(self.url)} returned no score after {tries}: {last}")

    def _post(self, data: bytes, timeout_s: float) -> bytes:
        """Send `data` as an HTTP POST and return the body of the reply.

        Raises:
            TimeoutError: the reply is not complete within `timeout_s`.
            ValueError: the reply is too large.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key_env is not None:
            headers["Authorization"] = f"Bearer {_key(self.api_key_env)}"
        end, parts, size = time.monotonic() + timeout_s, list[bytes](), 0
        request = urllib.request.Request(self.url, data, headers)
        with _opener().open(request, timeout=timeout_s) as answer:
            while part := answer.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if time.monotonic() > end:
                    raise TimeoutError("the server began a reply, but did not finish it in time")
                if size > _LARGEST:
                    raise ValueError(f"the reply has more than {_LARGEST >> 20} MB")
        return b"".join(parts)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats redirects as replies without a score: key and data are meant for one server."""

    def redirect_request(self, *arguments: Any) -> None:
        """Follow no redirect."""


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def _key(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(
            "the environment variable of the key is not set, or is empty, in the worker",
            where=f"{KWARGS}.api_key_env",
            found=variable,
            fix=f"export {variable} where workers start, or name another variable",
        )
    return value


def ask_all(
    requests: Sequence[T], ask: Callable[[T], list[Any]], count: Callable[[T], int], concurrency: int
) -> list[Any]:
    """Send requests with one or more samples each, `concurrency` at a time, and return the results of all samples in
    order. Samples of a request without a reply get a `ScoringFailure` each."""

    def one(request: T) -> list[Any]:
        try:
            return ask(request)
        except NoAnswer as error:
            return [ScoringFailure(str(error), collateral=place > 0) for place in range(count(request))]

    with ThreadPoolExecutor(min(concurrency, max(1, len(requests))), "megarl-reward-request") as pool:
        return [result for results in pool.map(one, requests) for result in results]


def _reply_text(error: urllib.error.HTTPError, limit: int = 300) -> str:
    """Return the target of a redirect, or the beginning of the text of an error response, for an error message."""
    if 300 <= error.code < 400:
        return f"it redirects to {mask(str(error.headers.get('Location')))}, and redirects are not followed"
    try:
        text = " ".join(error.read(2000).decode(errors="replace").split())
    except (OSError, http.client.HTTPException) as broken:
        return f"its text did not arrive ({type(broken).__name__})"
    return text if len(text) <= limit else f"{text[:limit]}..."
