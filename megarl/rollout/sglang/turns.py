"""Turns on SGLang servers. Each turn is a request of its own, which is sent, awaited and aborted independently.

    first rank of a replica:  submit --> TurnClient (a thread) --> servers --> finished turns
    ranks of a replica:       wait: look --(no turn of the replica has finished)--> look again
                                      |--(some have)--> return them on all ranks of the replica
                                      '--(a meeting is called)--> meet
    all ranks of the run:     meet: failed? -(some server)-> kill it, restart it, catch_up when it answers
                                    stuck? --(some rank)---> wait for restarted servers, catch_up, send turns again
                                    idle? ---(all replicas)--> generation is over

Replicas generate on their own. The ranks of a replica look at each other several times a second while turns are in
flight (in `SglangEngine.generate` every few seconds). All ranks of the run meet only when one of them calls a meeting
(`Meetings`): a server has failed or is starting again, a rank has an error or no server, or the last replica has
finished. So an error on one rank ends all ranks, and all ranks replace failed servers together.

A failed server is replaced while the others generate, and gets turns as soon as it holds the current weights. A rank is
stuck when no server with the current weights is left. Finished turns are kept; the others continue after `catch_up` has
updated the restarted servers.

All turns of an episode, and all episodes with the same first observation, go to one server, whose prefix cache then
holds the earlier tokens.
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

import torch

from megarl.rollout.engine import Completion, Request, ignore_progress
from megarl.rollout.sglang.client import Dispatch, for_others
from megarl.rollout.sglang.fleet import LostServer
from megarl.rollout.sglang.images import ServedImages
from megarl.rollout.sglang.router import AttentionGroups
from megarl.rollout.sglang.samples import ServedSample
from megarl.rollout.stop_strings import StopStrings
from megarl.system.errors import ServerError
from megarl.system.tracing import beat

if TYPE_CHECKING:
    from megarl.config.rollout import SamplingConfig
    from megarl.data.image_set import ImageSet
    from megarl.rollout.sglang.api import ServerApi
    from megarl.rollout.sglang.engine import SglangEngine

_LOOK_EVERY_S = 0.2
_CHECK_EVERY_S = 5.0
_CLOSE_S = 30.0


class TurnClient:
    """Sends turns to servers, waits for them and aborts them, in a thread with its own event loop.

    Args:
        make: builds the `Dispatch` from the arguments `done` and `failures`.
        advance: called from the thread with the number of turns that have just finished.

    Attributes:
        running: number of groups of turns in flight.
        error: the first error of a group of turns; None: no error.
    """

    def __init__(
        self,
        make: Callable[[Callable[[ServedSample], None], deque[LostServer]], Dispatch],
        advance: Callable[[int], None] = ignore_progress,
    ) -> None:
        self._changed = threading.Condition()
        self._fresh = self.running = 0
        self.error: BaseException | None = None
        self._failures: deque[LostServer] = deque()
        self._advance, self._dispatch = advance, make(self._finished, self._failures)
        self._jobs: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turns", daemon=True)
        self._thread.start()
        self._connection = AsyncExitStack()
        self._in_loop(self._connection.enter_async_context(self._dispatch.connected())).result(_CLOSE_S)

    def failures(self) -> list[LostServer]:
        """Return the servers that failed since the last call."""
        return [self._failures.popleft() for _ in range(len(self._failures))]  # the thread may append meanwhile

    def add(self, servers: Mapping[int, ServerApi]) -> None:
        """Send turns to these servers too."""
        self._loop.call_soon_threadsafe(self._dispatch.add, servers)

    def send(self, samples: Sequence[ServedSample], *, last: bool = False) -> None:
        """Send the servers requests for a group of turns with equal prompts; `last`: no later turn has this prompt."""
        with self._changed:
            self.running += 1
        self._in_loop(self._run(self._finish(samples, last), group=True))

    def abort(self, sample: ServedSample) -> None:
        """Abort a turn in flight; it finishes with its partial tokens."""
        self._in_loop(self._run(self._dispatch.abort(sample), group=False))

    def forget(self, prompt: int) -> None:
        """Forget which server has `prompt`, because no more of its turns will be sent."""
        self._loop.call_soon_threadsafe(self._dispatch.forget, prompt)

    def pause(self, seconds: float, *, whole: bool = False) -> None:
        """Wait up to `seconds` until a turn has finished since the last pause, or with `whole` until all have."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None or not self.running or (self._fresh and not whole), seconds
            )
            self._fresh = 0

    def close(self) -> None:
        """Drop all turns in flight; servers end requests whose connection closes."""
        self._in_loop(self._shut()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    def _in_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _finished(self, sample: ServedSample) -> None:
        self._advance(1)
        with self._changed:
            self._fresh += 1
            self._changed.notify_all()

    async def _finish(self, samples: Sequence[ServedSample], last: bool) -> None:
        await self._dispatch.finish(samples)
        if last:
            self._dispatch.forget(samples[0].prompt)

    async def _run(self, work: Coroutine[Any, Any, None], *, group: bool) -> None:
        """Run `work`; store its error for the rank that waits, unless an earlier one is stored."""
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
    """The state that one rank sends to all other ranks when they synchronize.

    Attributes:
        busy: whether the rank needs further turns.
        over: whether the replica has finished turns that `wait` has not returned.
        in_flight: whether servers are generating turns of the replica.
        stuck: whether the replica has unfinished turns but no server with the current weights.
        error: fields of the `ServerError` that every rank raises.
        failures: fields of `LostServer` of servers that failed since the last report.
        late: whether the last check of starting servers was several seconds ago.
    """

    busy: bool
    over: bool
    in_flight: bool
    stuck: bool
    error: dict[str, Any] | None
    failures: list[dict[str, Any]]
    late: bool


class ServerTurns:
    """A `Generation` on the servers of `engine`.

    Args:
        advance: for `SglangEngine.generate`: called, from any thread, with the number of turns that have just finished.
            `wait` then returns when all turns have finished, and each sequence has one turn. None: an episode may have
            several turns.
    """

    is_async: ClassVar[bool] = True
    is_batched: ClassVar[bool] = False

    def __init__(
        self,
        engine: SglangEngine,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        strings: StopStrings | None,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        self._engine, self._sampling, self._stop_ids = engine, sampling, list(stop_ids)
        self._strings, self._advance, self._whole = strings, advance or ignore_progress, advance is not None
        self._replica = engine.replica
        self._client: TurnClient | None = None
        self._samples: dict[int, ServedSample] = {}  # sequence -> its turn, until `wait` returns the turn
        self._to_send: dict[int, ServedSample] = {}  # sequence -> its turn, if that is not sent to a server yet
        self._numbers = itertools.count()
        self._prompts: dict[Hashable, int] = {}  # first tokens and images -> the router's number of the prompt
        self._begins: dict[int, Hashable] = {}  # sequence -> its first tokens and images
        self._users: Counter[Hashable] = Counter()  # first tokens and images -> number of sequences that have them
        # images, alive while turns use them
        self._images: WeakValueDictionary[Hashable, ServedImages] = WeakValueDictionary()
        self._busy = True
        self._recoveries = 0
        self._checked = time.monotonic()  # when the ranks last checked starting servers

    def submit(
        self, sequence: int, tokens: list[int], seed: int, room: int, images: ImageSet | None = None, begun: int = 0
    ) -> None:
        """Submit the next turn of `sequence`, which is sent to a server by the next `any_busy` or `wait`."""
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
        fields: dict[str, Any] = {"room": room, "begun": begun, **self._recorded()}
        sample = ServedSample(prompt, list(tokens), seed, images=served, **fields)
        self._samples[sequence] = self._to_send[sequence] = sample

    def _recorded(self) -> dict[str, Any]:
        """Return fields of a new sample: stop strings, form of the routes, and an empty record of kept tokens."""
        record: list[list[int]] | None = [] if self._engine.keeps_tokens and self._sampling.is_bounded else None
        return {"strings": self._strings, "form": self._engine.routes, "kept_tokens": record}

    def submit_all(self, requests: Sequence[Request]) -> None:
        """Submit the samples of all requests as sequences 0, 1, ..., in the order of requests and of their seeds."""
        for prompt, request in enumerate(requests if self._replica.is_first else ()):
            fields: dict[str, Any] = {"room": request.room, "begun": request.begun}
            fields["images"] = None if request.images is None else ServedImages(request.images)
            for seed in request.seeds:
                sample = ServedSample(prompt, request.prompt_ids, seed, **fields, **self._recorded())
                self._samples[len(self._samples)] = sample
        self._to_send = dict(self._samples)

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        """Wait until a turn has finished, no turn is in flight, or `enough()` is True; return all finished turns, by
        sequence. Collective over the replica.

        Raises:
            ServerError: on every rank, if no server is left or a server rejected a request as invalid.
        """
        if not self._busy:
            return {}
        while True:
            self._send()
            if self._client is not None:
                self._client.pause(_CHECK_EVERY_S if self._whole else _LOOK_EVERY_S, whole=self._whole)
            over, in_flight = self._look()
            if (over and not self._whole) or not in_flight or (enough is not None and enough()):
                return self._take()

    def abort(self, sequence: int) -> None:
        """Abort the turn of `sequence` on its server, or drop it if no server has it; `wait` returns its partial
        tokens."""
        if not self._replica.is_first:
            return
        if self._to_send.pop(sequence, None) is not None:
            self._samples[sequence].finish_reason = "abort"
        elif self._client is not None:
            self._client.abort(self._samples[sequence])

    def forget(self, sequence: int) -> None:
        """Forget the sequence, and its prompt if no other sequence begins with this prompt."""
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
        """Return whether any rank is busy; `busy` is the state of this rank's replica. Collective over the replica.

        A busy replica returns at once. An idle replica waits for the next meeting, in which all ranks exchange reports.
        It is called when no replica is busy any more, or for another reason, such as a failed server.

        Raises:
            ServerError: on every rank, if no server is left or a server rejected a request as invalid.
            WorkerError: a busy replica makes no progress.
        """
        self._busy = busy
        if busy:
            self._send()
            return True
        called = False
        while not called:
            self._call_if_needed()
            meetings = self._engine.meetings
            called, _, _ = self._share(meetings.await_call() if self._replica.is_first else meetings.is_called())
            beat()
        any_busy = any(report.busy for report in self._meet())
        if not any_busy:
            self._engine.leave()
        return any_busy

    def close(self) -> None:
        """Drop all in-flight turns, and record the failures of servers."""
        if self._client is not None:
            client, self._client = self._client, None
            client.close()
            self._engine.note(client.failures())

    def _send(self) -> None:
        """Send submitted turns to servers. Turns whose servers have all failed go to other servers, if any are left."""
        client = self._client
        if client is not None and not client.running and client.error is None:
            unfinished = {number: sample for number, sample in self._samples.items() if sample.finish_reason is None}
            if unfinished.keys() - self._to_send.keys():
                self._to_send = unfinished
                self.close()
        if self._to_send and self._client is None and (servers := self._engine.servers()):
            settings = self._engine.config, servers, self._sampling, self._stop_ids, self._engine.tag
            groups_of = AttentionGroups(self._engine.config.attention_dp, self._engine.first_group)

            def make(done: Callable[[ServedSample], None], failures: deque[LostServer]) -> Dispatch:
                dispatch = Dispatch(*settings, done, failures)
                dispatch.groups = groups_of
                return dispatch

            self._client = TurnClient(make, self._advance)
        if self._client is None:
            return
        groups: dict[tuple[int, ...], list[ServedSample]] = {}
        for sample in self._to_send.values():
            # The requests of a group must have equal tokens. Turns of an episode share a prompt number, but not their
            # tokens, so the key has the tokens too.
            tokens: Sequence[int] = () if self._whole else sample.prompt_ids
            groups.setdefault((sample.prompt, len(sample.token_ids), *tokens), []).append(sample)
        self._to_send = {}
        for group in groups.values():
            self._client.send(group, last=self._whole)

    def _look(self) -> tuple[bool, bool]:
        """Return whether the replica has finished turns that `wait` has not returned, and whether it has turns in
        flight. If a meeting of all ranks was called, join it first. Collective over the replica."""
        self._send()
        self._call_if_needed()
        called, over, in_flight = self._share(self._engine.meetings.is_called())
        if called:
            report = self._meet()[self._replica.lead]
            return report.over, report.in_flight
        beat()
        return over, in_flight

    def _call_if_needed(self) -> None:
        """Call a meeting of all ranks, in which they exchange reports, if this rank has an error, failed or starting
        servers, or turns but no server."""
        client = self._client
        if client is not None:
            self._engine.note(client.failures())
        late = time.monotonic() - self._checked >= _CHECK_EVERY_S and self._engine.replacing
        if late or self._to_send or self._engine.has_failures or (client is not None and client.error is not None):
            self._engine.meetings.call()

    def _share(self, called: bool) -> tuple[bool, bool, bool]:
        """Return whether any rank of the replica has (meeting called, finished turns, turns in flight); a meeting is a
        call of all ranks of the run to exchange reports. Collective over the replica.

        Args:
            called: whether this rank has seen that a meeting was called.
        """
        over, in_flight = self._counts()
        state = self._replica.group.all_reduce(
            torch.tensor([called, over > 0, in_flight > 0], dtype=torch.int64), "max"
        )
        is_called, any_over, any_in_flight = map(bool, state.tolist())
        return is_called, any_over, any_in_flight

    def _counts(self) -> tuple[int, int]:
        """Return how many turns have finished but were not returned yet, and how many are in flight."""
        over = sum(sample.finish_reason is not None for sample in self._samples.values())
        return over, len(self._samples) - over - len(self._to_send)

    def _meet(self) -> list[_Report]:
        """Exchange reports until no rank is stuck; return them by rank. Collective over all ranks of the run."""
        self._engine.meetings.begin()
        while True:
            self._send()
            error = None if self._client is None else self._client.error
            reports = [_Report(**fields) for fields in self._replica.world.all_gather_json(asdict(self._report(error)))]
            beat()
            if error is not None:
                raise error
            for report in reports:
                if report.error is not None:
                    raise ServerError(**report.error)
            self._replace(reports)
            if not any(report.stuck for report in reports):
                return reports
            if not any(report.in_flight for report in reports):
                self.close()
                self._engine.recover(self._recoveries)
                self._recoveries += 1
            elif self._client is not None:
                self._client.pause(_LOOK_EVERY_S, whole=True)

    def _report(self, error: BaseException | None) -> _Report:
        over, in_flight = self._counts()
        if self._client is not None:
            self._engine.note(self._client.failures())
        return _Report(
            self._busy,
            over > 0,
            in_flight > 0,
            bool(self._to_send),
            None if error is None else for_others(error),
            self._engine.pop_failures(),
            time.monotonic() - self._checked >= _CHECK_EVERY_S,
        )

    def _replace(self, reports: Sequence[_Report]) -> None:
        """Restart failed servers, and check starting servers every few seconds. Collective over the run's ranks."""
        failures = [failure for report in reports for failure in report.failures]
        if not failures and not any(report.late for report in reports):
            return
        self._checked = time.monotonic()
        self._engine.replace(failures, fill=any(report.busy for report in reports))
        if self._client is not None:
            self._client.add(self._engine.servers())

    def _take(self) -> dict[int, Completion]:
        """Return the finished turns on all ranks of the replica, by sequence."""
        over = {sequence: s for sequence, s in self._samples.items() if s.finish_reason is not None}
        self._samples = {sequence: s for sequence, s in self._samples.items() if sequence not in over}
        self._engine.count_drafts(over.values())
        completions = {sequence: sample.completion() for sequence, sample in over.items()}
        plain = [[sequence, completion.to_json()] for sequence, completion in completions.items()]
        received = self._replica.group.broadcast_json(plain)
        return {sequence: Completion.from_json(fields) for sequence, fields in received}
