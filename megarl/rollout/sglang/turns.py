"""Turns of episodes on SGLang servers, each a request of its own, which is sent, awaited and aborted by itself.

    first rank of a replica:  submit --> TurnClient (a thread) --> servers --> turns that are over
    every rank:               wait: meet --(none of my replica is over)--> meet again
                                      '--(some are)--> the turns, on all ranks of the replica

Ranks meet several times a second while turns are on their way, so that an error on one ends all of them, none waits for
another so long that it is taken for dead, and all replace servers together that have failed. Servers go on with what
they have while environments answer, and replicas go on without each other.

All turns of an episode, and all episodes with the same first observation, go to one server: it has what came before in
its prefix cache.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from megarl.rollout.engine import Completion
from megarl.rollout.sglang.client import Dispatch, for_others, taken
from megarl.rollout.sglang.fleet import LostServer
from megarl.rollout.sglang.images import ServedImages
from megarl.rollout.sglang.samples import ServedSample
from megarl.rollout.stop_strings import StopStrings
from megarl.system.errors import ServerError
from megarl.system.tracing import beat

if TYPE_CHECKING:
    from megarl.config.rollout import SamplingConfig
    from megarl.data.image_set import ImageSet
    from megarl.rollout.sglang.api import ServerApi
    from megarl.rollout.sglang.engine import SglangEngine

_MEET_EVERY_S = 0.2
_LOOK_EVERY_S = 5.0
_CLOSE_S = 30.0


class TurnClient:
    """The client for samples that are sent, finished and aborted one by one, in a thread with an event loop.

    Args:
        make: a Dispatch that calls its first argument with every sample that is finished, and puts servers that fail
            into the second.

    Attributes:
        running: groups of samples that are under way.
        error: the error that ended one of them.
    """

    def __init__(self, make: Callable[[Callable[[ServedSample], None], deque[LostServer]], Dispatch]) -> None:
        self._changed = threading.Condition()
        self._fresh = self.running = 0
        self.error: BaseException | None = None
        self._failures: deque[LostServer] = deque()
        self._call = make(self._note, self._failures)
        self._jobs: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turns", daemon=True)
        self._thread.start()
        self._connection = AsyncExitStack()
        self._in_loop(self._connection.enter_async_context(self._call.connected())).result(_CLOSE_S)

    def failures(self) -> list[LostServer]:
        """Return the servers that failed since the last call."""
        return taken(self._failures)

    def add(self, servers: Mapping[int, ServerApi]) -> None:
        """Ask these servers, too."""
        self._loop.call_soon_threadsafe(self._call.add, servers)

    def send(self, samples: Sequence[ServedSample]) -> None:
        """Ask for samples of equal prompts."""
        with self._changed:
            self.running += 1
        self._in_loop(self._run(self._call.finish(samples), group=True))

    def abort(self, sample: ServedSample) -> None:
        """End a sample that was sent with what there is of it."""
        self._in_loop(self._run(self._call.abort(sample), group=False))

    def forget(self, prompt: int) -> None:
        """Forget `prompt`: no more samples of it will come."""
        self._loop.call_soon_threadsafe(self._call.forget, prompt)

    def pause(self, seconds: float, *, whole: bool = False) -> None:
        """Wait until a sample is finished that no pause has seen, or with `whole` until all are, at most so long."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None or not self.running or (self._fresh and not whole), seconds
            )
            self._fresh = 0

    def close(self) -> None:
        """Give up what is under way: servers end requests that nobody waits for."""
        self._in_loop(self._shut()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    def _in_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _note(self, sample: ServedSample) -> None:
        with self._changed:
            self._fresh += 1
            self._changed.notify_all()

    async def _run(self, work: Coroutine[Any, Any, None], *, group: bool) -> None:
        """Do `work`, and keep the first error for the rank that waits."""
        job = asyncio.current_task()
        assert job is not None
        self._jobs.add(job)
        try:
            await work
        except Exception as error:
            self.error = self.error or error
        finally:
            self._jobs.discard(job)
            with self._changed:
                self.running -= group
                self._changed.notify_all()

    async def _shut(self) -> None:
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await self._connection.aclose()


@dataclass
class _Report:
    """The report of a rank to the others when they meet.

    Attributes:
        busy: its episodes are not all over.
        over: turns of its replica are, and nobody has taken them yet.
        under_way: turns of its replica are with servers.
        stuck: no server with the current weights is left for some of them.
        failure: fields of the ServerError that ends all ranks.
        failures: servers that its requests have found failed, as `SglangEngine.tell` has them.
        late: it is time to look after servers that were started again.
    """

    busy: bool
    over: bool
    under_way: bool
    stuck: bool
    failure: dict[str, Any] | None
    failures: list[dict[str, Any]]
    late: bool


class ServerTurns:
    """A `Generation` over the servers of `engine`. `any_busy` says whether there is anything to `wait` for."""

    is_async: ClassVar[bool] = True
    is_batched: ClassVar[bool] = False

    def __init__(
        self,
        engine: SglangEngine,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        strings: StopStrings | None,
    ) -> None:
        self._engine, self._sampling, self._stop_ids = engine, sampling, list(stop_ids)
        self._strings = strings
        self._replica = engine.replica
        self._client: TurnClient | None = None
        self._samples: dict[int, ServedSample] = {}  # sequence -> its turn, until it is taken
        self._to_send: dict[int, ServedSample] = {}  # those that no server has
        self._numbers = itertools.count()
        self._prompts: dict[Hashable, int] = {}  # what sequences begin with -> number for the router
        self._begins: dict[int, Hashable] = {}  # sequence -> what it begins with
        self._users: Counter[Hashable] = Counter()  # how many sequences begin with it
        self._images: WeakValueDictionary[Hashable, ServedImages] = WeakValueDictionary()  # of turns, which keep them
        self._busy = True
        self._recoveries = 0
        self._looked = time.monotonic()  # when this rank looked after servers

    def submit(
        self, sequence: int, tokens: list[int], seed: int, room: int, images: ImageSet | None = None, begun: int = 0
    ) -> None:
        """Implement `Generation.submit`. The turn is sent with the next `any_busy` or `wait`."""
        if not self._replica.is_first:
            return
        key = None if images is None else (images.digests, images.places)
        if sequence not in self._begins:
            self._begins[sequence] = begin = (tuple(tokens), key)
            self._users[begin] += 1
            if begin not in self._prompts:
                self._prompts[begin] = next(self._numbers)
        served = None if images is None else self._images.setdefault(key, ServedImages(images))
        prompt = self._prompts[self._begins[sequence]]
        sample = ServedSample(prompt, list(tokens), seed, room=room, images=served, strings=self._strings, begun=begun)
        self._samples[sequence] = self._to_send[sequence] = sample

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        """Implement `Generation.wait`. Collective over the run's busy ranks, with the `any_busy` of the others.

        Raises:
            ServerError: no server is left, or one refused a request as wrong, on any rank.
        """
        if not self._busy:
            return {}
        while True:
            self._send()
            if self._client is not None:
                self._client.pause(_MEET_EVERY_S)
            mine = self._meet()[self._replica.lead]
            if mine.over or not mine.under_way or (enough is not None and enough()):
                return self._take()

    def abort(self, sequence: int) -> None:
        """Implement `Generation.abort`."""
        if not self._replica.is_first:
            return
        if self._to_send.pop(sequence, None) is not None:
            self._samples[sequence].finish_reason = "abort"
        elif self._client is not None:
            self._client.abort(self._samples[sequence])

    def forget(self, sequence: int) -> None:
        """Implement `Generation.forget`."""
        begin = self._begins.pop(sequence, None)
        if begin is None:
            return
        self._users[begin] -= 1
        if not self._users[begin]:
            del self._users[begin]
            prompt = self._prompts.pop(begin)
            if self._client is not None:
                self._client.forget(prompt)

    def any_busy(self, busy: bool) -> bool:
        """Implement `Generation.any_busy`. Collective over all ranks of the run.

        Raises:
            ServerError: as in `wait`.
        """
        self._busy = busy
        goes_on = any(report.busy for report in self._meet())
        if not goes_on:
            self._engine.leave()
        return goes_on

    def close(self) -> None:
        """Implement `Generation.close`."""
        if self._client is not None:
            client, self._client = self._client, None
            client.close()
            self._engine.note(client.failures())

    def _send(self) -> None:
        """Give submitted samples to servers; those that lost all of their servers go to others, if any are left."""
        client = self._client
        if client is not None and not client.running and client.error is None:
            unfinished = {number: sample for number, sample in self._samples.items() if sample.finish_reason is None}
            if unfinished.keys() - self._to_send.keys():
                self._to_send = unfinished
                self.close()
        if self._to_send and self._client is None and (servers := self._engine.servers()):
            reachable = {server.number: server.api for server in servers}
            sampling, stop_ids = self._sampling, self._stop_ids
            self._client = TurnClient(lambda *told: self._engine.call(reachable, sampling, stop_ids, *told))
        if self._client is None:
            return
        groups: dict[tuple[int, ...], list[ServedSample]] = {}
        for sample in self._to_send.values():
            groups.setdefault((sample.prompt, len(sample.token_ids), *sample.prompt_ids), []).append(sample)
        self._to_send = {}
        for group in groups.values():
            self._client.send(group)

    def _meet(self) -> list[_Report]:
        """Return the reports of all ranks, by rank, once none is stuck. Collective over all ranks of the run."""
        while True:
            self._send()
            error = None if self._client is None else self._client.error
            reports = [_Report(**fields) for fields in self._replica.world.all_gather_json(asdict(self._report(error)))]
            beat()
            if error is not None:
                raise error
            for report in reports:
                if report.failure is not None:
                    raise ServerError(**report.failure)
            self._replace(reports)
            if not any(report.stuck for report in reports):
                return reports
            if not any(report.under_way for report in reports):
                self._recover()
            elif self._client is not None:
                self._client.pause(_MEET_EVERY_S, whole=True)

    def _report(self, error: BaseException | None) -> _Report:
        over = [sample for sample in self._samples.values() if sample.finish_reason is not None]
        sent = len(self._samples) - len(over) - len(self._to_send)
        failure = None if error is None else for_others(error)
        if self._client is not None:
            self._engine.note(self._client.failures())
        late = time.monotonic() - self._looked > _LOOK_EVERY_S
        return _Report(self._busy, bool(over), sent > 0, bool(self._to_send), failure, self._engine.tell(), late)

    def _replace(self, reports: Sequence[_Report]) -> None:
        """Look after the servers where one has failed, and every few seconds. The same on all ranks."""
        failures = [one for report in reports for one in report.failures]
        if not failures and not any(report.late for report in reports):
            return
        self._looked = time.monotonic()
        self._engine.replace(failures, fill=any(report.busy for report in reports))
        if self._client is not None:
            self._client.add({server.number: server.api for server in self._engine.servers()})

    def _recover(self) -> None:
        """Restart servers. Nothing is under way on any rank."""
        self.close()
        self._engine.recover(self._recoveries)
        self._recoveries += 1

    def _take(self) -> dict[int, Completion]:
        """Return the turns that are over, on all ranks of the replica."""
        over = {sequence: s for sequence, s in self._samples.items() if s.finish_reason is not None}
        self._samples = {sequence: s for sequence, s in self._samples.items() if sequence not in over}
        self._engine.count_drafts(over.values())
        plain = [[sequence, asdict(sample.completion())] for sequence, sample in over.items()]
        return {sequence: Completion(**fields) for sequence, fields in self._replica.group.broadcast_json(plain)}
