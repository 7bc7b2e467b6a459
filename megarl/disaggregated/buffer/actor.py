"""The buffer's process: a named Ray actor around `buffer.core`.

A call whose result is available returns at once. Any other call waits for a few seconds at most and then returns where
all other teams stand; the client calls again or raises. So no client hangs when the actor is gone.

When the actor dies, the launcher ends the attempt, and the run continues from its newest checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.dag.staleness import StalenessSettings
from megarl.disaggregated.buffer.core import Change, Core, GroupInfo, HandoverError, Share, Topic
from megarl.disaggregated.buffer.flow import FlowGroup
from megarl.disaggregated.buffer.progress import Ping, Progress, ProgressTable

if TYPE_CHECKING:
    from megarl.dag.placement import Placement

T = TypeVar("T")
#: The result of a call that waits: its result and an empty list, or None and where the other teams stand.
Answer = tuple[T | None, list[Progress]]

NAMESPACE = "megarl"


class BufferActor:
    """The process around a `megarl.disaggregated.buffer.core.Core`. Every call names the calling worker."""

    def __init__(
        self, placement: Placement, groups_per_step: int, share: Share, flow: StalenessSettings | None = None
    ) -> None:
        self._core = Core(placement, groups_per_step, share, flow)
        self._progress = ProgressTable([team.name for team in placement.teams], time.monotonic())
        self._waiting: dict[Topic, set[asyncio.Future[None]]] = {}
        #: (start, serial number, result) of each worker's last call of `change`
        self._last_changes: dict[tuple[str, int], tuple[int, int, Any]] = {}

    async def ping(self, team: str, rank: int, ping: Ping) -> None:
        """Record a worker's report on where it stands."""
        self._progress.ping(team, rank, ping, time.monotonic())

    async def end(self) -> None:
        """Never return: the launcher waits for this call to fail, which happens when the actor dies."""
        await asyncio.Event().wait()

    async def change(self, team: str, rank: int, start: int, serial: int, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the core that changes its state, and return the result.

        A worker repeats a call whose reply was lost; a repeated call returns the same result and changes nothing. Raise
        HandoverError if the core refuses the call, or the worker belongs to an earlier start of its team.

        Args:
            start: number of the team's restarts when this worker started.
            serial: number of this worker's call.
            arguments: in a list, because Ray would fetch the bytes of references that are arguments themselves.
        """
        if start != self._core.starts(team):
            raise HandoverError(
                f"team {team!r} was restarted after rank {rank} of start {start}: this process must not continue"
            )
        last = self._last_changes.get((team, rank))
        if last is None or last[:2] != (start, serial):
            result: Any
            try:
                change: Change = getattr(self._core, method)(*arguments)
                self._wake(change.topics)
                result = change.answer
            except HandoverError as error:
                result = error
            last = self._last_changes[team, rank] = start, serial, result
        if isinstance(last[2], HandoverError):
            raise last[2]
        return last[2]

    async def restart_team(self, team: str, number: int, limit_s: float) -> int | None:
        """Call `Core.restart_team`. Other teams wait up to `limit_s` for the team's new processes."""
        finished = self._core.restart_team(team, number)
        self._wake(list(self._waiting))
        self._progress.restart(team, time.monotonic(), limit_s)
        return finished

    async def assignment(
        self, team: str, step: int, samples: str, part: int, slice_s: float
    ) -> Answer[list[GroupInfo]]:
        """Return the groups of one part."""
        ask = lambda: self._core.assignment(team, step, samples, part)  # noqa: E731
        return await self._answer(team, ask, ("samples", step, samples), slice_s)

    async def fetch(self, team: str, step: int, key: str, uids: Sequence[str], slice_s: float) -> Answer[list[Any]]:
        """Return references to the bytes of groups."""
        ask = lambda: self._core.fetch(team, step, key, uids)  # noqa: E731
        return await self._answer(team, ask, ("handover", step, key), slice_s)

    async def read(self, team: str, name: str, slice_s: float) -> Answer[str]:
        """Return the text of a message."""
        return await self._answer(team, lambda: self._core.read(name), ("mail", name), slice_s)

    async def is_posted(self, name: str) -> bool:
        """Return whether a message is posted under this name."""
        return self._core.read(name) is not None

    async def drained(self, version: int) -> bool:
        """Return whether no group is in flight, and none may be admitted with `version` of the weights."""
        return self._core.drained(version)

    async def flow_state(self) -> dict[str, Any]:
        """Return the position in the prompts, for a checkpoint."""
        return self._core.flow_state()

    async def unused(self, step: int) -> list[FlowGroup]:
        """Return finished groups for a checkpoint, with references to their bytes."""
        return self._core.unused(step)

    async def queues(self) -> dict[str, int]:
        """Count the groups that wait for each team."""
        return self._core.queues()

    async def _answer(self, team: str, ask: Callable[[], T | None], topic: Topic, slice_s: float) -> Answer[T]:
        answer = ask()
        if answer is None:
            await self._come(topic, slice_s)
            answer = ask()
        return answer, [] if answer is not None else self._progress.others(team, time.monotonic())

    async def _come(self, topic: Topic, slice_s: float) -> None:
        """Wait for `topic`, for at most `slice_s` seconds."""
        waiters = self._waiting.setdefault(topic, set())
        waiter = asyncio.get_running_loop().create_future()
        waiters.add(waiter)
        await asyncio.wait([waiter], timeout=slice_s)
        waiters.discard(waiter)
        if not waiters and self._waiting.get(topic) is waiters:
            del self._waiting[topic]

    def _wake(self, topics: Iterable[Topic]) -> None:
        for topic in topics:
            for waiter in self._waiting.pop(topic, ()):
                waiter.set_result(None)


def start_buffer(
    name: str,
    placement: Placement,
    groups_per_step: int,
    share: Share,
    environment: Mapping[str, str] | None = None,
    flow: StalenessSettings | None = None,
) -> Any:
    """Start the buffer of a run in an initialised Ray. It ends with the process that starts it, or when it is
    killed.

    It runs on the node of the process that starts it.

    Args:
        name: `BufferClient.connect` finds it by this name; no two runs of a cluster share one.
        groups_per_step: most groups that a step has, `data.batch_size`.
        flow: groups are handed over when they are ready; None: step by step.

    Returns:
        The actor's handle, which the caller keeps. The actor need not have started yet.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    workers = sum(team.devices for team in placement.teams)
    # without this the control store would keep a record of each of the last 100,000 calls
    make = ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(BufferActor).options(
        name=name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=4 * workers + 100,  # every worker may wait, while its pings must still be served
        runtime_env={"env_vars": dict(environment or {})},
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    )
    return make.remote(placement, groups_per_step, share, flow)
