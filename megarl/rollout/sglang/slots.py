"""Assigns slots of servers (places for samples in flight) to samples. A slot that becomes free wakes one waiting sample
that can use it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from megarl.rollout.sglang.router import NoServerError, Router
from megarl.rollout.sglang.samples import ServedSample


class Slots:
    """The slots (places for samples in flight) of all servers, inside one event loop.

    A sample whose prompt is already on a server waits for a slot of this server; a sample of a new prompt waits for any
    slot. Each has its own queue, so freeing a slot takes the same time however many samples wait.

    Args:
        servers: numbers of the servers.
        capacity: maximum number of samples in flight per server.
    """

    def __init__(self, servers: Iterable[int], capacity: int) -> None:
        self._router: Router[int] = Router(servers, capacity)
        #: Server of the prompt (None: a new prompt) -> its waiting samples; futures that are done no longer wait.
        self._queues: dict[int | None, deque[asyncio.Future[int | None]]] = {}
        self._waiting: dict[int, asyncio.Future[int | None]] = {}  # id of a waiting sample -> its future

    async def take(self, sample: ServedSample) -> int | None:
        """Wait for a slot for `sample`, and return the number of its server; None: the sample was aborted, or no server
        is left."""
        offered: int | None = None
        try:
            while not sample.aborted:
                number = self._router.take(sample.prompt)
                if number is not None:
                    if number != offered:
                        self._offer(offered)  # another sample can use the slot: this one got a slot elsewhere
                    return number
                self._offer(offered)  # another sample can use the slot: this prompt is on a full server by now
                offered = await self._wait(sample)
        except NoServerError:
            offered = None
        self._offer(offered)
        return None

    def give_back(self, number: int) -> None:
        """Free a slot of server `number`, which may have been dropped, and wake a sample that can use the slot."""
        self._router.give_back(number)
        self._offer(number)

    def wake(self, sample: ServedSample) -> None:
        """Wake the sample if it waits, so that its `take` notices that the sample was aborted."""
        waiter = self._waiting.get(id(sample))
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def add(self, number: int) -> None:
        """Add a server that is new or was dropped before, and wake the samples that wait for any slot."""
        self._router.add(number)
        self._wake_all(None)

    def drop(self, number: int) -> None:
        """Remove a server, and wake the samples that wait for it; their prompts go to other servers."""
        self._router.drop(number)
        self._wake_all(number)
        if not self._router.names:
            self._wake_all(None)

    def forget(self, prompt: int) -> None:
        """Forget which server has `prompt`, because no more of its samples will be sent."""
        self._router.forget(prompt)

    async def _wait(self, sample: ServedSample) -> int | None:
        """Wait until this sample is woken. Return the number of the server whose slot may be free; None: the sample was
        woken for another reason."""
        waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(self._router.home(sample.prompt), deque()).append(waiter)
        self._waiting[id(sample)] = waiter
        try:
            return await waiter
        finally:
            del self._waiting[id(sample)]

    def _offer(self, number: int | None) -> None:
        """Wake one sample that waits for a slot of server `number`, or else one that waits for any slot.

        Does nothing if the server has no free slot any more; else woken samples would wake each other without end.
        """
        if number is None or not self._router.has_room(number):
            return
        for key in (number, None):
            queue = self._queues.get(key, deque())
            while queue:
                waiter = queue.popleft()
                if not waiter.done():
                    waiter.set_result(number)
                    return

    def _wake_all(self, key: int | None) -> None:
        for waiter in self._queues.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)
