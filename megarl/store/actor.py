"""The store's process: a named Ray actor around `megarl.store.core`. Calls that wait come back after a while, empty.

A call that finds what it asks for answers at once. Another waits for a slice of a few seconds; then it answers with
where all other teams stand, and the client asks again, or gives up. So nobody hangs on an actor that is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.store.core import Core, GroupInfo, Share, Topic
from megarl.store.flow import FlowSettings
from megarl.store.standing import Ping, Roll, Standing

if TYPE_CHECKING:
    from megarl.dag.placement import Placement

T = TypeVar("T")
#: What a call that waits comes back with: the answer or None, and where the other teams stand if it is None.
Answer = tuple[T | None, list[Standing]]

NAMESPACE = "megarl"


class StoreActor:
    """See `megarl.store.core.Core`, whose methods these are; every one is told which worker calls."""

    def __init__(
        self, placement: Placement, groups_per_step: int, share: Share, flow: FlowSettings | None = None
    ) -> None:
        self._core = Core(placement, groups_per_step, share, flow)
        self._roll = Roll([team.name for team in placement.teams], time.monotonic())
        self._waiting: dict[Topic, set[asyncio.Future[None]]] = {}

    async def ping(self, team: str, rank: int, ping: Ping) -> None:
        """Hear where a worker stands."""
        self._roll.ping(team, rank, ping, time.monotonic())

    async def give(
        self, team: str, rank: int, step: int, key: str, groups: Sequence[GroupInfo], refs: Sequence[Any]
    ) -> None:
        """Take references to what a replica hands over; in a list, or Ray would fetch the bytes here."""
        self._wake(self._core.give(team, rank, step, key, groups, refs))

    async def assignment(
        self, team: str, step: int, samples: str, part: int, slice_s: float
    ) -> Answer[list[GroupInfo]]:
        """Groups of one part."""
        ask = lambda: self._core.assignment(team, step, samples, part)  # noqa: E731
        return await self._answer(team, ask, ("samples", step, samples), slice_s)

    async def fetch(self, team: str, step: int, key: str, uids: Sequence[str], slice_s: float) -> Answer[list[Any]]:
        """References to groups' bytes."""
        ask = lambda: self._core.fetch(team, step, key, uids)  # noqa: E731
        return await self._answer(team, ask, ("handover", step, key), slice_s)

    async def done(self, team: str, rank: int, step: int) -> None:
        """A worker needs nothing more of a step."""
        self._core.done(team, rank, step)

    async def open_flow(
        self, step: int, number: int, begun: Sequence[tuple[int, int]], again: Sequence[int]
    ) -> list[int]:
        """Begin to give out prompts."""
        return self._core.open_flow(step, number, begun, again)

    async def admit(self, version: int, most: int) -> list[int]:
        """Give out prompts."""
        return self._core.admit(version, most)

    async def put(
        self,
        team: str,
        rank: int,
        numbers: Sequence[int],
        groups: Sequence[GroupInfo],
        refs: Mapping[str, Sequence[Any]],
        metrics: str,
    ) -> None:
        """Take references to finished groups."""
        self._wake(self._core.put(team, rank, numbers, groups, refs, metrics))

    async def reject(self, numbers: Sequence[int]) -> None:
        """Groups that are of no use."""
        self._core.reject(numbers)

    async def flow_state(self) -> dict[str, Any]:
        """What a checkpoint has to know."""
        return self._core.flow_state()

    async def queues(self) -> dict[str, int]:
        """How many groups wait for whom."""
        return self._core.queues()

    async def post(self, name: str, value: str) -> None:
        """Keep mail."""
        self._wake(self._core.post(name, value))

    async def read(self, team: str, name: str, slice_s: float) -> Answer[tuple[str]]:
        """Mail, in a tuple."""
        return await self._answer(team, lambda: self._core.read(name), ("mail", name), slice_s)

    async def peek(self, name: str) -> tuple[str] | None:
        """Mail, in a tuple, if it is there."""
        return self._core.read(name)

    async def _answer(self, team: str, ask: Callable[[], T | None], topic: Topic, slice_s: float) -> Answer[T]:
        found = ask()
        if found is None:
            await self._come(topic, slice_s)
            found = ask()
        return found, [] if found is not None else self._roll.others(team, time.monotonic())

    async def _come(self, topic: Topic, slice_s: float) -> None:
        """Wait for `topic`, for `slice_s` seconds at most."""
        waiters = self._waiting.setdefault(topic, set())
        mine = asyncio.get_running_loop().create_future()
        waiters.add(mine)
        await asyncio.wait([mine], timeout=slice_s)
        waiters.discard(mine)
        if not waiters and self._waiting.get(topic) is waiters:
            del self._waiting[topic]

    def _wake(self, topics: list[Topic]) -> None:
        for topic in topics:
            for waiter in self._waiting.pop(topic, ()):
                waiter.set_result(None)


def start_store(
    name: str,
    placement: Placement,
    groups_per_step: int,
    share: Share,
    environment: Mapping[str, str] | None = None,
    flow: FlowSettings | None = None,
) -> Any:
    """Start the store of a run; Ray is initialised. It ends with the process that starts it, or when it is killed.

    Args:
        name: by which `StoreClient.connect` finds it; no two runs of a cluster share one.
        placement: of the run.
        groups_per_step: most groups that a step has, `data.batch_size`.
        share: `placement.share`.
        environment: variables of its process.
        flow: groups come as they get ready; None: step by step.

    Returns:
        The actor's handle, which the caller keeps. It need not be there yet.
    """
    import ray

    workers = sum(team.devices for team in placement.teams)
    make = ray.remote(max_restarts=0, max_task_retries=0)(StoreActor).options(
        name=name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=4 * workers + 100,  # every worker may wait, and must still be heard
        runtime_env={"env_vars": dict(environment or {})},
    )
    return make.remote(placement, groups_per_step, share, flow)
