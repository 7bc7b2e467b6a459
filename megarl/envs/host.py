"""The host of environments: one rank of a replica runs the environments of all episodes concurrently, however long they
wait.

Coroutines share one event loop in a separate thread; plain methods run in a few threads. An error ends only its own
episode: it is returned as a Reply, and the recipe's `on_error` decides what follows.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.data.observations import are_parts, separate_images
from megarl.envs.protocol import Action, Continuation, Ending, Environment, EpisodeFailure, Services, Step
from megarl.system.errors import MegarlError, UserError, count, describe
from megarl.system.imports import is_of_user
from megarl.system.tracing import beat

if TYPE_CHECKING:
    from megarl.data.image_prompts import ImagePrompts
    from megarl.data.image_set import ImageSet

_BEAT_EVERY_S = 1.0
_THREADS = 16
#: Exceptions of an environment that end only its own episode.
_CONTAINED = (Exception, SystemExit, asyncio.CancelledError)
_Outcome = tuple[Any, BaseException | None]
#: Names of metrics `env/<name>` that megarl itself writes, so environments may not use them.
_TAKEN = ("cached", "cut", "errors", "greedy_errors", "tokens/max", "tokens/mean", "turns/max", "turns/mean")


class HostError(MegarlError):
    """No episode can get replies any more; the message names the environment."""


@dataclass
class Reply:
    """The reply of an environment, as plain data."""

    # text, chat messages or token ids; None: after `reset` the prompt of the data, later no observation
    observation: Any = None
    reward: float = 0.0
    done: bool = False
    info: dict[str, float] = field(default_factory=dict)
    error: str = ""  # why the environment could not reply
    # whether the same error would occur again: the environment's own code raised it, or its reply is invalid
    repeats: bool = False
    # images of the observation, in which the model's image text stands for each
    images: list[ImageSet] = field(default_factory=list)
    # if turns were replayed, the environment's earlier replies: the first observation and the reply to each turn but
    # the last
    before: list[Reply] = field(default_factory=list)

    def refuse(self, error: str) -> None:
        """Mark the reply as unusable, with the reason; a repeated episode would get the same reply."""
        self.error, self.repeats = error, True


class Host:
    """Runs the environments of a replica; each `HostSession` has its own episodes.

    Args:
        kind: class of the environment.
        settings: its validated keys.
        answer_s: seconds that one call of an environment may take; None: no limit.
        images: how images of observations are read; None: observations are text.
        services: the run's tokenizer, chat template and limits, for environments that need them.

    Raises:
        Exception: any error that `kind.open_with` raises.
    """

    def __init__(
        self,
        kind: type[Environment],
        settings: Any,
        answer_s: float | None = None,
        images: ImagePrompts | None = None,
        services: Services | None = None,
    ) -> None:
        self._kind, self._settings, self._images, self._services = kind, settings, images, services
        self._answer_s = None if kind.times_itself else answer_s
        self._shared = kind.open_with(settings, services)
        self._threads = ThreadPoolExecutor(_THREADS, "environment")
        # a call waits here, not in the thread pool, so its time starts when it runs
        self._free = asyncio.Semaphore(_THREADS)
        self._loop = asyncio.new_event_loop()
        # time at which the loop was asked for a heartbeat; None once it has replied
        self._asked_at: float | None = None
        self._looping = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._looping.start()

    def session(self) -> HostSession:
        """Return a session, whose episodes are independent of those of other sessions."""
        return HostSession(self)

    async def make(self) -> Environment:
        """Return a new environment for one episode."""
        environment: Environment = await self.call(self._kind, self._settings, self._shared)
        if self._services is not None and self._kind.needs_policies:
            environment.services = self._services
        return environment

    def start(self, work: Coroutine[Any, Any, Reply]) -> Future[Reply]:
        """Start the coroutine `work` in the thread of all coroutines."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def discard(self, environments: Iterable[Environment]) -> None:
        """Free what these environments hold, in the thread of coroutines."""
        for environment in environments:
            if type(environment).discard is not Environment.discard:
                self._loop.call_soon_threadsafe(environment.discard)

    def close(self) -> None:
        """Close what the environments share, and end the threads."""
        try:
            self._kind.close(self._shared)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._threads.shutdown(wait=False, cancel_futures=True)

    def check_loop(self) -> None:
        """Check that the thread of coroutines is running and not blocked. Raise HostError if the thread has ended, or a
        coroutine blocks it.
        """
        if not self._looping.is_alive():
            raise HostError(
                f"env.name: the thread of the environment {self._kind.__qualname__} has ended, so nothing replies\n  "
                "found:   a coroutine or method that raised KeyboardInterrupt or SystemExit, or stopped the event "
                "loop\n  fix:     raise an Exception instead"
            )
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._note_turn)
        elif self._answer_s is not None and time.monotonic() - self._asked_at > self._answer_s:
            raise HostError(
                f"env.name: a coroutine of the environment {self._kind.__qualname__} blocks all others\n"
                f"  found:   no await for more than {self._answer_s:g} s\n"
                "  fix:     await what it waits for, or make it a plain method, which runs in a thread"
            )

    def _note_turn(self) -> None:
        self._asked_at = None

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a method of an environment, which may be a coroutine."""
        if inspect.iscoroutinefunction(method):
            return await self._in_time(_settled(method(*arguments)))
        async with self._free:
            try:
                work = self._loop.run_in_executor(self._threads, _contained, method, arguments)
                result = await self._in_time(work)
            except _Late:
                # only the thread of the late call is lost; calls in the other threads continue
                self._threads.shutdown(wait=False)
                self._threads = ThreadPoolExecutor(_THREADS, "environment")
                raise
        return await self._in_time(_settled(result)) if inspect.isawaitable(result) else result

    async def read_images(self, reply: Reply) -> Reply:
        """Return the reply with its images read, in a thread if there may be images, since reading takes long."""
        try:
            if self._images is None:
                reply.observation, _ = separate_images(reply.observation, None)
            else:
                reply.observation, reply.images = await self.call(separate_images, reply.observation, self._images)
        except UserError as error:
            raise _Refused(f"the environment returned an observation that cannot be read: {error}") from error
        return reply

    async def _in_time(self, work: Awaitable[_Outcome]) -> Any:
        """Return the outcome of `work` within `answer_s`; after that it is abandoned, even if it continues."""
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=self._answer_s)
        if not done:
            task.cancel()
            raise _Late(f"the environment did not reply within {self._answer_s:g} s, half of cluster.timeout_s")
        result, error = task.result()
        if error is not None:
            raise error
        return result


class HostSession:
    """The episodes of one request for samples. Environments live until `forget`, whatever is generated meanwhile."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._episodes: dict[int, Environment] = {}
        self._answers: dict[int, Future[Reply]] = {}

    def begin(self, number: int, row: dict[str, Any], seed: int, said: Sequence[Action] = ()) -> None:
        """Start an episode and replay the turns `said`; `answers` returns the reply to the last one."""
        self._answers[number] = self._host.start(self._begin(number, row, seed, said))

    def step(self, number: int, action: Action) -> None:
        """Start the reply to a turn of an episode; `answers` returns it."""
        self._answers[number] = self._host.start(self._step(number, action))

    def any_answer(self) -> bool:
        """Return whether any environment's reply is ready. Raise HostError if no replies are possible any more."""
        if self._answers:
            self._host.check_loop()
        return any(answer.done() for answer in self._answers.values())

    def dropped(self, turns: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return those of `turns` in flight that the environment has dropped (`Environment.dropped_turns`), so that
        their remaining tokens need not be sampled.

        A turn is given as (number of the episode, position among the episode's turns that are sampled at the same
        time).
        """
        episodes = self._episodes
        return [(number, at) for number, at in turns if number in episodes and at in episodes[number].dropped_turns]

    def answers(self, wait_s: float, to: Iterable[int] = ()) -> dict[int, Reply]:
        """Return the ready replies, after waiting up to `wait_s` seconds for the episodes in `to`, or else for any.
        Raise HostError like `any_answer`.
        """
        wanted = [self._answers[number] for number in to if number in self._answers]
        wait_for(wanted or self._answers.values(), wait_s, ALL_COMPLETED if wanted else FIRST_COMPLETED)
        if not self.any_answer():
            return {}
        return self._take({number for number, answer in self._answers.items() if answer.done()})

    def all_answers(self) -> dict[int, Reply]:
        """Return the replies to all started turns, in the order of their starts. Raise HostError like `any_answer`.

        Environments that wait until other episodes end are left out (`Environment.is_waiting`).
        """
        while True:
            waiting = {number for number, environment in list(self._episodes.items()) if environment.is_waiting}
            awaited = [
                answer for number, answer in self._answers.items() if not answer.done() and number not in waiting
            ]
            if not awaited:
                break
            wait_for(awaited, _BEAT_EVERY_S)
            self._host.check_loop()
            beat()
        return self._take({number for number, answer in self._answers.items() if answer.done()})

    def forget(self, number: int) -> None:
        """Drop an episode; if its environment still computes a reply, that call is cancelled."""
        if (answer := self._answers.pop(number, None)) is not None:
            answer.cancel()
        environment = self._episodes.pop(number, None)
        self._host.discard([] if environment is None else [environment])

    def close(self) -> None:
        """Drop all episodes; their replies are no longer needed."""
        for answer in self._answers.values():
            answer.cancel()
        self._host.discard(self._episodes.values())
        self._episodes, self._answers = {}, {}

    def _take(self, numbers: set[int]) -> dict[int, Reply]:
        replies = {number: answer.result() for number, answer in self._answers.items() if number in numbers}
        self._answers = {number: answer for number, answer in self._answers.items() if number not in replies}
        return replies

    async def _begin(self, number: int, row: dict[str, Any], seed: int, said: Sequence[Action]) -> Reply:
        async def call() -> Reply:
            self._episodes[number] = environment = await self._host.make()
            first = await self._host.call(environment.reset, row, seed)
            if isinstance(first, Step):  # the episode ended before the first turn
                return _reply_of(first)
            return await self._host.read_images(Reply(_plain_observation(first)))

        replies = [await _guarded("reset", call)]
        for action in said:
            if replies[-1].error:
                break
            replies.append(await self._step(number, action))
        *before, last = replies
        return replace(last, before=before)

    async def _step(self, number: int, action: Action) -> Reply:
        async def call() -> Reply:
            reply = _reply_of(await self._host.call(self._episodes[number].step, action))
            return await self._host.read_images(reply)

        return await _guarded(f"step (turn {action.turn})", call)


def _contained(method: Callable[..., Any], arguments: tuple[Any, ...]) -> _Outcome:
    """Return the result or exception of a plain method. StopIteration, which a coroutine cannot raise, is converted."""
    try:
        return method(*arguments), None
    except StopIteration as error:
        return None, RuntimeError(describe(error)).with_traceback(error.__traceback__)
    except _CONTAINED as error:
        return None, error


async def _settled(work: Awaitable[Any]) -> _Outcome:
    """Return the result or exception of a coroutine; a SystemExit that escaped a task would end the thread of all
    coroutines."""
    try:
        return await work, None
    except _CONTAINED as error:
        return None, error


async def _guarded(what: str, call: Callable[[], Awaitable[Reply]]) -> Reply:
    try:
        return await call()
    except _Refused as error:
        return Reply(error=f"{what}: {error}", repeats=not isinstance(error, _Late))
    except EpisodeFailure as error:
        return Reply(error=f"{what}: {error}")
    except _CONTAINED as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{what} raised {describe(error)}"
        place = f"{frame.filename}:{frame.lineno}: {frame.line}"
        return Reply(error=f"{text} ({place})", repeats=is_of_user(error))


class _Refused(Exception):
    """The environment returned an invalid answer."""


class _Late(_Refused):
    """The environment did not reply in time."""


def _reply_of(value: Any) -> Reply:
    if not isinstance(value, tuple) or len(value) != len(Step._fields):
        kind = f"tuple of {count(len(value), 'value')}" if isinstance(value, tuple) else type(value).__name__
        raise _Refused(
            f"the environment returned a value of the wrong type ({kind}): {value!r:.80}; "
            "allowed: Step(observation, reward, done, info)"
        )
    observation, reward, done, info = value
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__") or not math.isfinite(float(reward)):
        raise _Refused(f"the environment returned the reward {reward!r:.80}, which is not a finite number")
    numbers = {str(name): float(number) for name, number in dict(info).items()}
    if reserved := sorted(set(numbers) & set(_TAKEN)):
        names = ", ".join(_TAKEN)
        raise _Refused(f"the environment returned the info key {reserved[0]!r}; allowed: keys other than {names}")
    if not all(map(math.isfinite, numbers.values())):
        raise _Refused(f"the environment returned the info {numbers}; allowed: finite numbers")
    if done:
        observation = observation if isinstance(observation, Ending) else None
    else:
        observation = _plain_observation(observation)
    if not done and not observation:
        raise _Refused("the environment returned no observation or an empty one, but the episode is not done")
    return Reply(observation, float(reward), bool(done), numbers)


def _plain_observation(value: Any) -> Any:
    """Return the observation if it is valid; token ids may be any sequence of integers."""
    if value is None or isinstance(value, str | Continuation):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        if all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
            return list(value)
        if are_parts(value) or all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value):
            return list(value)
    raise _Refused(
        f"the environment returned the observation {value!r:.80}; allowed: text, chat messages, token ids, parts of "
        "text and images"
    )
