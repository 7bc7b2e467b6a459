"""Slots of servers, for which samples wait: a slot that becomes free wakes one sample that can use it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from megarl.rollout.sglang.router import NoServerError, Router
from megarl.rollout.sglang.samples import ServedSample


class Slots:
    """The slots of all servers, inside one event loop.

    A sample whose prompt has a server waits for that server's slots; a sample of a new prompt waits for any slot. So an
    answer costs the same however many samples wait.

    Args:
        servers: numbers of the servers.
        capacity: maximum number of samples in flight per server.
    """

    def __init__(self, servers: Iterable[int], capacity: int) -> None:
        self._router: Router[int] = Router(servers, capacity)
        #: Waiting samples by the server of their prompt; None: of new prompts. Those that are done no longer wait.
        self._queues: dict[int | None, deque[asyncio.Future[int | None]]] = {}
        self._waiting: dict[int, asyncio.Future[int | None]] = {}  # id of a sample -> what it waits for

    async def take(self, sample: ServedSample) -> int | None:
        """Wait for a slot, and return the number of its server; None: the sample was aborted, or no server is left."""
        offered: int | None = None
        try:
            while not sample.aborted:
                number = self._router.take(sample.prompt)
                if number is not None:
                    if number != offered:
                        self._offer(offered)  # to another sample: this one has a slot of another server
                    return number
                self._offer(offered)  # to another sample: this one's prompt has a server by now, which is full
                offered = await self._wait(sample)
        except NoServerError:
            offered = None
        self._offer(offered)
        return None

    def give_back(self, number: int) -> None:
        """Free a slot of a server, which may have been dropped meanwhile."""
        self._router.give_back(number)
        self._offer(number)

    def wake(self, sample: ServedSample) -> None:
        """Let a waiting sample notice that it was aborted."""
        waiter = self._waiting.get(id(sample))
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def add(self, number: int) -> None:
        """Add a server that is new, or was dropped before."""
        self._router.add(number)
        self._wake_all(None)

    def drop(self, number: int) -> None:
        """Remove a server; its prompts go to other servers."""
        self._router.drop(number)
        self._wake_all(number)
        if not self._router.names:
            self._wake_all(None)

    def forget(self, prompt: int) -> None:
        """Forget which server has `prompt`, because no more of its samples will be sent."""
        self._router.forget(prompt)

    async def _wait(self, sample: ServedSample) -> int | None:
        """Wait until a slot may be free, and return the number of its server; None: for another reason."""
        waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(self._router.home(sample.prompt), deque()).append(waiter)
        self._waiting[id(sample)] = waiter
        try:
            return await waiter
        finally:
            del self._waiting[id(sample)]

    def _offer(self, number: int | None) -> None:
        """Wake one sample that waits for a slot of this server, or else one that waits for any slot.

        Does nothing if the slot is no longer free: samples would pass it on to each other without end.
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
